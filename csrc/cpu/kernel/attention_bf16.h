// A tile of bf16 whose products run on pairs of elements; what lies between them is that of every other type.
#pragma once

#include "cpu/kernel/products.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/tile.h"
#if defined(MHA_CPU_BF16_PAIRS)
#include "cpu/kernel/pairs.h"
#endif

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

struct Pairs;

template <typename T>
struct PairProducts;

#if defined(MHA_CPU_BF16_PAIRS)
template <typename T>
constexpr bool kInPairs = std::is_same_v<T, BFloat16>;

constexpr int kPairsOfQuarter = 4;  // transposed together: 16 bytes of a row

// Queries as (pairs of d, kTileRows), not scaled: a scaled one would have to be rounded again. Rows and elements beyond
// the last are zeros.
void load_query_pairs(const TileState& state) {
  const AttentionParams& params = state.params;
  constexpr int kStep = 2 * kPairsOfQuarter;
  const int head_dim = params.head_dim, padded = (head_dim + kStep - 1) / kStep * kStep;
  float* to = state.memory.queries;
  auto* copies = reinterpret_cast<BFloat16*>(state.memory.key);  // idle: K is read as it lies
  for (int r = 0; r < state.vectors * kLanes; r += kLanes) {
    const BFloat16* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      BFloat16* copy = copies + i * padded;
      rows[i] = copy;
      if (r + i >= state.count) {
        std::memset(copy, 0, padded * sizeof(BFloat16));
        continue;
      }
      const BFloat16* row = row_of<BFloat16>(params.query, params.query_strides, state.tile.batch,
                                             state.rows.head[r + i], state.tile.query_start + state.rows.query[r + i]);
      if (padded == head_dim) {
        rows[i] = row;
      } else {
        std::memcpy(copy, row, head_dim * sizeof(BFloat16));
        std::memset(copy + head_dim, 0, (padded - head_dim) * sizeof(BFloat16));
      }
    }
    for (int d = 0; d < head_dim; d += kStep) transpose_pairs(rows, d, to + d / 2 * kTileRows + r, kTileRows);
  }
}

// Rows of an odd number of elements, with a zero after each: (count, width + 1).
void pad_rows(const BFloat16* from, int64_t stride, int count, int width, BFloat16* to) {
  for (int k = 0; k < count; ++k, from += stride, to += width + 1) {
    std::memcpy(to, from, width * sizeof(BFloat16));
    to[width] = BFloat16{0};
  }
}

// The weights of keys 2 i and 2 i + 1 become row i of the scores.
void pair_weights(const TileState& state, const ScoreBlockState& block) {
  float* scores = state.memory.scores;
  for (int at = 0; at < state.vectors * kLanes; at += kLanes) {
    for (int k = 0; k < block.keys; k += 2) {
      const Vec second = k + 1 < block.keys ? load(scores + (k + 1) * kScoreStride + at) : Vec{};
      store(scores + k / 2 * kScoreStride + at, round_to_pairs(load(scores + k * kScoreStride + at), second));
    }
  }
}

// Rows of V as (pairs of keys, padded), padded in whole vectors. What lies beyond the last row or column, or in a row
// that no query has `seen`, becomes 0.
void pair_values(const BFloat16* from, int64_t stride, int count, int width, int padded, const uint8_t* seen,
                 float* to) {
  for (int k = 0; k < count; k += 2, to += padded) {
    const BFloat16 *first = from + k * stride, *second = k + 1 < count ? first + stride : first;
    const uint32_t has_first = !seen || seen[k] ? ~0u : 0u;
    const uint32_t has_second = k + 1 < count && (!seen || seen[k + 1]) ? ~0u : 0u;
    for (int d = 0; d < width; d += 2 * kLanes) {
      const int left = width - d;
      const uint32_t columns = left >= 2 * kLanes ? ~0u : (1u << left) - 1;
      const __m512i a = load_halves(first + d, columns & has_first), b = load_halves(second + d, columns & has_second);
      store(to + d, pair_lower(a, b));
      if (left > kLanes) store(to + d + kLanes, pair_upper(a, b));
    }
  }
}

int padded_width(int head_dim_v) { return (head_dim_v + kLanes - 1) / kLanes * kLanes; }

// Values as all tiles of a head take them: (batch, num_heads_kv, pairs of keys, padded width). Packing pays from a few
// tiles on; where a mask hides keys, or heads differ in length, each tile makes its own.
int64_t packed_values_size(const AttentionParams& params) {
  constexpr int kWorthPacking = 4 * kTileRows;
  const int64_t rows = params.seqlen_q * (params.num_heads_q / params.num_heads_kv);
  if (rows < kWorthPacking || params.cu_seqlens_q || params.rule.attn_mask) return 0;
  return params.batch * params.num_heads_kv * ((params.seqlen_kv + 1) / 2) * padded_width(params.head_dim_v);
}

void pack_values(const AttentionParams& params, float* packed_values, int64_t head) {
  const int64_t batch = head / params.num_heads_kv;
  int64_t count = params.seqlen_kv;
  if (params.rule.key_lengths) count = std::clamp<int64_t>(params.rule.key_lengths[batch], 0, count);
  const int width = padded_width(params.head_dim_v);
  pair_values(row_of<BFloat16>(params.value, params.value_strides, batch, head % params.num_heads_kv, 0),
              params.value_strides.row, static_cast<int>(count), params.head_dim_v, width, nullptr,
              packed_values + head * ((params.seqlen_kv + 1) / 2) * width);
}

template <>
struct PairProducts<BFloat16> {
  static constexpr auto load_queries = load_query_pairs;
  static constexpr auto pad_keys = pad_rows;
  static constexpr auto load_weights = pair_weights;
  static constexpr auto load_values = pair_values;
};
#else
template <typename T>
constexpr bool kInPairs = false;
#endif

template <typename T>
using UnitOf = std::conditional_t<kInPairs<T>, Pairs, Floats>;

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
