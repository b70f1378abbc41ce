// A tile of bf16 whose products run on pairs of elements; what lies between them is that of every other type.
#pragma once

#include "cpu/kernel/scores.h"
#include "cpu/kernel/tile.h"
#if defined(MHA_CPU_BF16_PAIRS)
#include "cpu/kernel/products_bf16.h"
#endif

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

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
  auto* to = reinterpret_cast<uint32_t*>(state.memory.queries);
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

void score_in_pairs(const TileState& state, const ScoreBlockState& block, const BFloat16* key, int64_t stride) {
  const auto* queries = reinterpret_cast<const uint32_t*>(state.memory.queries);
  KeyRange seen = kNoKeys;
  for (int v = 0; v < state.vectors; ++v) widen(seen, block.of_vector[v].begin, block.of_vector[v].end);
  for (int k = seen.begin; k < seen.end; k += kBlock) {
    const int size = seen.end - k < kBlock ? seen.end - k : kBlock;
    int first = 0, last = state.vectors;  // vectors with a row that sees one of these keys
    const auto sees = [&](int v) { return block.of_vector[v].begin < k + size && block.of_vector[v].end > k; };
    while (first < last && !sees(first)) ++first;
    while (first < last && !sees(last - 1)) --last;
    if (first == last) continue;
    const ScorePairs scores = {key + k * stride,
                               stride,
                               queries + first * kLanes,
                               state.params.head_dim,
                               state.params.scale,
                               state.memory.scores + k * kScoreStride + first * kLanes,
                               size};
    with_size<kVectors>(last - first, scores);
  }
}

// The weights of keys 2 i and 2 i + 1 become row i of the scores.
void pair_weights(const TileState& state, const ScoreBlockState& block) {
  float* scores = state.memory.scores;
  for (int at = 0; at < state.vectors * kLanes; at += kLanes) {
    for (int k = 0; k < block.keys; k += 2) {
      const Vec second = k + 1 < block.keys ? load(scores + (k + 1) * kScoreStride + at) : Vec{};
      const BitVec pairs = round_to_pairs(load(scores + k * kScoreStride + at), second);
      std::memcpy(scores + k / 2 * kScoreStride + at, &pairs, sizeof(pairs));
    }
  }
}

// After the softmax. `output`: of the tile's first row, where what these keys add finishes it.
void add_values_in_pairs(const TileState& state, const ScoreBlockState& block, const KeyRange* of_group,
                         const BFloat16* value, int64_t stride, const uint8_t* seen, BFloat16* output) {
  Scratch& memory = state.memory;
  const int width = state.value_width, vectors = width / kLanes;
  auto* pairs = reinterpret_cast<uint32_t*>(memory.value);
  pair_values(value, stride, block.keys, state.params.head_dim_v, width, seen, pairs);
  pair_weights(state, block);
  for (int v = 0; v < vectors; v += kVectors) {
    for (int r = 0, group = 0; r < state.count; r += kBlock, ++group) {
      KeyRange keys = of_group[group].within(block.first, block.first + block.keys);
      if (keys.empty()) {
        if (state.has_output && !output) continue;  // nothing to add or to rescale
        keys = {block.first, block.first};
      }
      // A key more on either side to make pairs of: its weights are 0.
      const int begin = (keys.begin - block.first) / 2, end = (keys.end - block.first + 1) / 2;
      const int64_t output_stride = state.params.output_strides.row;
      const OutputPairs product = {memory.scores + begin * kScoreStride + r,
                                   pairs + begin * width + v * kLanes,
                                   width,
                                   end - begin,
                                   state.has_output ? state.rows.rescale + r : nullptr,
                                   memory.out + r * width + v * kLanes,
                                   width,
                                   state.rows.factor + r,
                                   output ? output + r * output_stride + v * kLanes : nullptr,
                                   output_stride,
                                   state.count - r < kBlock ? state.count - r : kBlock};
      with_size<kVectors>(vectors - v < kVectors ? vectors - v : kVectors, product);
    }
  }
}

template <>
struct PairProducts<BFloat16> {
  static constexpr auto load_queries = load_query_pairs;
  static constexpr auto score = score_in_pairs;
  static constexpr auto add_values = add_values_in_pairs;
};
#else
template <typename T>
constexpr bool kInPairs = false;
#endif

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
