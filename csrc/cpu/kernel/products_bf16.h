// The two products of a tile on pairs of bf16, blocked for registers as those of products.h are. Sums stay fp32.
//
//   scores   scores[key][row] = scale * K[key][pair of d] (broadcast) . queries[pair of d][row]
//   output   out[row][d] = weight[pair of keys][row] (broadcast) . V[pair of keys][d]
//
// K is read as it lies. Queries are transposed once a tile; weights and values are paired once a block of keys.
#pragma once

#include "cpu/kernel/pairs.h"
#include "cpu/kernel/products.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

MHA_INLINE uint32_t load_pair(const void* from) {
  uint32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return pair;
}
MHA_INLINE BitVec load_pairs(const void* from) {
  BitVec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
MHA_INLINE BitVec broadcast_pair(uint32_t pair) { return reinterpret_cast<BitVec>(_mm512_set1_epi32(pair)); }

struct ScorePairs {
  const BFloat16* key;
  int64_t key_stride;
  const uint32_t* queries;  // (pairs of d, kTileRows)
  int head_dim;
  float scale;
  float* scores;  // (keys, kScoreStride)
  int keys;

  template <int kKeys, int kVecs>
  MHA_INLINE void add(const uint32_t* query, const BitVec* each, Vec (&sum)[kKeys][kVecs]) const {
    BitVec x[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) x[v] = load_pairs(query + v * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[k][v] = dot(each[k], x[v], sum[k][v]);
    }
  }

  template <int kKeys, int kVecs>
  void block() const {
    Vec sum[kKeys][kVecs] = {};
    const uint32_t* query = queries;
    int d = 0;
    for (; d + 2 <= head_dim; d += 2, query += kTileRows) {
      BitVec each[kKeys];
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) each[k] = broadcast_pair(load_pair(key + k * key_stride + d));
      add(query, each, sum);
    }
    if (d < head_dim) {
      BitVec each[kKeys];
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) each[k] = broadcast_pair(key[k * key_stride + d].bits);
      add(query, each, sum);
    }
    const Vec factor = broadcast(scale);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(scores + k * kScoreStride + v * kLanes, factor * sum[k][v]);
    }
  }

  template <int kVecs>
  struct WithKeys {
    const ScorePairs& x;
    template <int kKeys>
    void run() const {
      x.template block<kKeys, kVecs>();
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBlock>(keys, WithKeys<kVecs>{*this});
  }
};

// Rows of V as (pairs of keys, padded), padded in whole vectors. What lies beyond the last row or column, or in a row
// that no query has `seen`, becomes 0.
void pair_values(const BFloat16* from, int64_t stride, int count, int width, int padded, const uint8_t* seen,
                 uint32_t* to) {
  for (int k = 0; k < count; k += 2, to += padded) {
    const BFloat16 *first = from + k * stride, *second = k + 1 < count ? first + stride : first;
    const uint32_t has_first = !seen || seen[k] ? ~0u : 0u;
    const uint32_t has_second = k + 1 < count && (!seen || seen[k + 1]) ? ~0u : 0u;
    for (int d = 0; d < width; d += 2 * kLanes) {
      const int left = width - d;
      const uint32_t columns = left >= 2 * kLanes ? ~0u : (1u << left) - 1;
      const __m512i a = load_halves(first + d, columns & has_first), b = load_halves(second + d, columns & has_second);
      const BitVec lower = pair_lower(a, b), upper = pair_upper(a, b);
      std::memcpy(to + d, &lower, sizeof(lower));
      if (left > kLanes) std::memcpy(to + d + kLanes, &upper, sizeof(upper));
    }
  }
}

// Like OutputBlock of products.h; the output is finished, rounded and in its place where `final` is given.
struct OutputPairs {
  const float* weights;  // (pairs of keys, kScoreStride), of the first row
  const uint32_t* value;
  int64_t value_stride;
  int pairs;
  const float* rescale;
  float* out;
  int64_t out_stride;
  const float* factor;
  BFloat16* final;
  int64_t final_stride;
  int rows;

  template <int kRows, int kVecs>
  void block() const {
    Vec sum[kRows][kVecs] = {};
    if (rescale) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = load(out + r * out_stride + v * kLanes) * broadcast(rescale[r]);
      }
    }
    const float* weight = weights;
    const uint32_t* row = value;
    for (int k = 0; k < pairs; ++k) {
      BitVec x[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) x[v] = load_pairs(row + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const BitVec each = broadcast_pair(load_pair(weight + r));
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = dot(each, x[v], sum[r][v]);
      }
      weight += kScoreStride;
      row += value_stride;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        if (final) {
          store_rounded(final + r * final_stride + v * kLanes, sum[r][v] * broadcast(factor[r]));
        } else {
          store(out + r * out_stride + v * kLanes, sum[r][v]);
        }
      }
    }
  }

  template <int kVecs>
  struct WithRows {
    const OutputPairs& x;
    template <int kRows>
    void run() const {
      x.template block<kRows, kVecs>();
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBlock>(rows, WithRows<kVecs>{*this});
  }
};

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
