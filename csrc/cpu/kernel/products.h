// The two products of a tile, blocked for registers. K and V are read as they lie, nothing is packed:
//
//   scores, queries in lanes   scores[key][row] = K[key][d] (broadcast) * queries[d][row]   summed over d
//   output, d in lanes         out[row][d] = weight[row][key] (broadcast) * V[key][d]       summed over keys
#pragma once

#include "cpu/kernel/elements.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Accumulators of a micro-kernel: kBlock broadcasts by kVectors vectors. 6 x 4 leaves 8 of 32 registers, 6 x 2 leaves 4
// of 16; wider and flatter shapes lose up to a quarter.
#if MHA_CPU_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kBlock = 6, kVectors = 4;
#else
constexpr int kBlock = 6, kVectors = 2;
#endif

// From a run-time size 1 .. kMax to a constant.
template <int kMax, typename Call>
MHA_INLINE void with_size(int size, const Call& call) {
  if constexpr (kMax > 1) {
    if (size < kMax) return with_size<kMax - 1>(size, call);
  }
  call.template run<kMax>();
}

template <int kKeys, int kVecs>
void score_block(const float* key, int64_t key_stride, const float* queries, int head_dim, float* scores) {
  Vec sum[kKeys][kVecs] = {};
  for (int d = 0; d < head_dim; ++d) {
    Vec query[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) query[v] = load(queries + d * kTileRows + v * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const Vec each = broadcast(key[k * key_stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[k][v] = fma(each, query[v], sum[k][v]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(scores + k * kScoreStride + v * kLanes, sum[k][v]);
  }
}

struct ScoreBlock {
  const float* key;
  int64_t key_stride;
  const float* queries;  // (head_dim, kTileRows)
  int head_dim;
  float* scores;  // (keys, kScoreStride)
  int keys;

  template <int kVecs>
  struct WithKeys {
    const ScoreBlock& x;
    template <int kKeys>
    void run() const {
      score_block<kKeys, kVecs>(x.key, x.key_stride, x.queries, x.head_dim, x.scores);
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBlock>(keys, WithKeys<kVecs>{*this});
  }
};

template <typename T>
struct OutputBlock {
  const float* weights;  // (keys, kScoreStride)
  const float* value;
  int64_t value_stride;
  int keys;
  const float* rescale;  // of the rows: what `out` holds is multiplied by it; null: it holds nothing
  float* out;
  int64_t out_stride;
  T* final;             // where the output goes instead, rounded; null: it is not finished
  const float* factor;  // of the rows: what makes the finished output
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
    const float* row = value;
    for (int k = 0; k < keys; ++k) {
      Vec x[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) x[v] = load(row + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec each = broadcast(weight[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(each, x[v], sum[r][v]);
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
    const OutputBlock& x;
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
