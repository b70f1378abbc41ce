// Decode: a tile of few rows, the queries of one key head's group, against many keys. Keys are read once for all rows.
//
//   scores[row][key] = K[key][d] * query[row][d]   d in lanes, lanes summed
//   out[row][d] += weight[row][key] * V[key][d]    d in lanes
#pragma once

#include "cpu/kernel/functions.h"
#include "cpu/kernel/products.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/softmax.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Up to this many rows d lies in lanes, above it rows do: then the lanes of half a vector would idle.
constexpr int kFewRows = kLanes / 2;
constexpr int kFewKeys = 96;  // of a block

#if MHA_CPU_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kDotRows = 4;
#else
constexpr int kDotRows = 2;  // 4 keys by 2 rows
#endif
constexpr int kDotKeys = 4;
constexpr int kFewVectors = 8;  // of a row's output in registers

struct alignas(64) FewRowsMemory {
  float queries[kFewRows * kMaxHeadDim];  // scale * query: (rows, head_dim)
  float scores[kFewRows * kFewKeys];      // (rows, kFewKeys)
  float value[kFewKeys * kMaxHeadDim];    // (keys, value_width) in fp32 where it cannot be read in place
  uint8_t seen[kFewKeys];                 // by some row, under a mask that all queries share
};

FewRowsMemory& few_rows_memory() {
  thread_local std::unique_ptr<FewRowsMemory> own(new FewRowsMemory);
  return *own;
}

// A block of keys, first .. first + keys - 1.
struct FewRowsBlock {
  const TileState& state;
  FewRowsMemory& memory;
  int first, keys;

  float* scores_of(int r) const { return memory.scores + r * kFewKeys; }
};

template <int kKeys, int kRows, typename T>
void dot_block(const T* key, int64_t key_stride, const float* query, int query_stride, int head_dim, float* scores,
               int64_t score_stride) {
  Vec sum[kRows][kKeys] = {};
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const Vec x = load_as_float(key + k * key_stride + d);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][k] = fma(x, load(query + r * query_stride + d), sum[r][k]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* to = scores + r * score_stride;
    if constexpr (kKeys == 4) {
      sum_lanes_of_four(sum[r], to);
    } else {
      for (int k = 0; k < kKeys; ++k) to[k] = sum_lanes(sum[r][k]);
    }
    for (int k = 0; k < kKeys; ++k) {
      for (int i = d; i < head_dim; ++i) to[k] += to_float(key[k * key_stride + i]) * query[r * query_stride + i];
    }
  }
}

template <typename T>
struct DotBlock {
  const T* key;
  int64_t key_stride;
  const float* query;  // (rows, query_stride)
  int query_stride, head_dim, keys;
  float* scores;  // (rows, score_stride)
  int64_t score_stride;

  template <int kRows>
  void run() const {
    int k = 0;
    for (; k + kDotKeys <= keys; k += kDotKeys) block<kDotKeys, kRows>(k);
    for (; k < keys; ++k) block<1, kRows>(k);
  }

  template <int kKeys, int kRows>
  MHA_INLINE void block(int k) const {
    dot_block<kKeys, kRows>(key + k * key_stride, key_stride, query, query_stride, head_dim, scores + k, score_stride);
  }
};

template <typename T>
struct WeightedSum {
  const float* weights;  // of the keys
  const T* value;
  int64_t value_stride;
  int keys;
  const float* rescale;  // what `out` holds is multiplied by it; null: it holds nothing
  float* out;

  template <int kVecs>
  void run() const {
    Vec sum[kVecs] = {};
    if (rescale) {
      for (int v = 0; v < kVecs; ++v) sum[v] = load(out + v * kLanes) * broadcast(*rescale);
    }
    for (int k = 0; k < keys; ++k) {
      const Vec each = broadcast(weights[k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[v] = fma(each, load_as_float(value + k * value_stride + v * kLanes), sum[v]);
    }
    for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, sum[v]);
  }
};

template <typename T>
void load_few_queries(const TileState& state, FewRowsMemory& memory) {
  const int head_dim = state.params.head_dim;
  for (int r = 0; r < state.count; ++r) {
    float* to = memory.queries + r * head_dim;
    read_row(query_row<T>(state, r), head_dim, head_dim, to);
    for (int d = 0; d < head_dim; ++d) to[d] *= state.params.scale;
  }
}

template <typename T>
void score_few_rows(const FewRowsBlock& block, const T* key) {
  const AttentionParams& params = block.state.params;
  const int head_dim = params.head_dim, count = block.state.count;
  for (int r = 0; r < count; r += kDotRows) {
    const DotBlock<T> dots = {key,
                              params.key_strides.row,
                              block.memory.queries + r * head_dim,
                              head_dim,
                              head_dim,
                              block.keys,
                              block.scores_of(r),
                              kFewKeys};
    with_size<kDotRows>(count - r < kDotRows ? count - r : kDotRows, dots);
  }
}

template <typename T>
void mask_few_rows(const FewRowsBlock& block, Mask<T> mask) {
  for (int r = 0; r < block.state.count; ++r) {
    const T* from = mask.data + block.state.rows.mask_offset[r] + block.first * mask.col_stride;
    float* scores = block.scores_of(r);
    for (int k = 0; k < block.keys; ++k) scores[k] = with_mask(scores[k], from[k * mask.col_stride]);
  }
}

// attention/mask.h's rule.
void apply_rule(const FewRowsBlock& block) {
  const TileState& state = block.state;
  const ScoreRuleParams& rule = state.params.rule;
  const Rows& rows = state.rows;
  if (rule.softcap != 0) {
    const Vec cap = broadcast(static_cast<float>(rule.softcap));
    const Vec inverse = broadcast(static_cast<float>(1 / rule.softcap));
    for (int r = 0; r < state.count; ++r) {
      for (int k = 0; k < block.keys; k += kLanes) {
        float* at = block.scores_of(r) + k;
        store(at, cap * tanh(load(at) * inverse));
      }
    }
  }
  if (rule.attn_mask) {
    with_mask_type(rule, [&](auto mask) { mask_few_rows(block, mask); });
  }
  if (rule.alibi_slopes) {
    for (int r = 0; r < state.count; ++r) {
      float* scores = block.scores_of(r);
      for (int k = 0; k < block.keys; ++k) {
        const int ahead = block.first + k - rows.position[r];
        scores[k] -= rows.slope[r] * static_cast<float>(ahead < 0 ? -ahead : ahead);
      }
    }
  }
  if (block.first >= state.full.begin && block.first + block.keys <= state.full.end) return;
  for (int r = 0; r < state.count; ++r) {
    float* scores = block.scores_of(r);
    const int begin = rows.begin[r] - block.first, end = rows.end[r] - block.first;
    for (int k = 0; k < block.keys && k < begin; ++k) scores[k] = -kInfinity<float>;
    for (int k = end > 0 ? end : 0; k < block.keys; ++k) scores[k] = -kInfinity<float>;
  }
}

template <bool kStats>
void weigh_few_rows(const FewRowsBlock& block) {
  Rows& rows = block.state.rows;
  const int padded = (block.keys + kLanes - 1) / kLanes * kLanes;
  for (int r = 0; r < block.state.count; ++r) {
    float* scores = block.scores_of(r);
    for (int k = block.keys; k < padded; ++k) scores[k] = -kInfinity<float>;
    Vec largest = broadcast(rows.max[r]);
    for (int k = 0; k < padded; k += kLanes) largest = max_with_nan(largest, load(scores + k));
    const float old_max = rows.max[r], new_max = max_lanes(largest);
    const float shift = new_max == -kInfinity<float> ? 0 : new_max;
    const float old_shift = old_max == -kInfinity<float> ? 0 : old_max;
    const float rescale = exp_of_negative(broadcast(old_max - shift))[0];
    Vec sum = {}, weighted = {};
    for (int k = 0; k < padded; k += kLanes) weigh<kStats>(scores + k, broadcast(shift), sum, weighted);
    if (kStats) {
      rows.weighted[r] = rescale * (rows.weighted[r] + rows.sum[r] * (old_shift - shift)) + sum_lanes(weighted);
    }
    rows.max[r] = new_max;
    rows.sum[r] = rescale * rows.sum[r] + sum_lanes(sum);
    rows.rescale[r] = rescale;
  }
}

template <typename T>
void add_few_rows(const FewRowsBlock& block, const T* value, int64_t value_stride) {
  const TileState& state = block.state;
  const int vectors = state.value_width / kLanes;
  for (int r = 0; r < state.count; ++r) {
    for (int v = 0; v < vectors; v += kFewVectors) {
      const WeightedSum<T> sum = {block.scores_of(r),
                                  value + v * kLanes,
                                  value_stride,
                                  block.keys,
                                  state.has_output ? state.rows.rescale + r : nullptr,
                                  state.memory.out + r * state.value_width + v * kLanes};
      with_size<kFewVectors>(vectors - v < kFewVectors ? vectors - v : kFewVectors, sum);
    }
  }
}

template <typename T>
void attend_few_rows(TileState& state, KeyRange keys) {
  const AttentionParams& params = state.params;
  const Tile& tile = state.tile;
  FewRowsMemory& memory = few_rows_memory();
  load_few_queries<T>(state, memory);
  for (int first = keys.begin; first < keys.end; first += kFewKeys) {
    const FewRowsBlock block = {state, memory, first, keys.end - first < kFewKeys ? keys.end - first : kFewKeys};
    const int64_t row = tile.key_start + first;
    score_few_rows(block, row_of<T>(params.key, params.key_strides, tile.batch, tile.head_kv, row));
    apply_rule(block);
    params.entropy ? weigh_few_rows<true>(block) : weigh_few_rows<false>(block);
    if (params.dropout.rng_state) drop_weights(state, {memory.scores, kFewKeys, 1, first, block.keys});

    const T* value = row_of<T>(params.value, params.value_strides, tile.batch, tile.head_kv, row);
    const bool hidden = shares_mask(state) && with_mask_type(params.rule, [&](auto mask) {
                          return find_hidden_keys(state, first, block.keys, mask, memory.seen);
                        });
    if (!hidden && state.value_width == params.head_dim_v) {
      add_few_rows(block, value, params.value_strides.row);
    } else {
      for (int k = 0; k < block.keys; ++k) {
        float* to = memory.value + k * state.value_width;
        if (hidden && !memory.seen[k]) {
          std::memset(to, 0, state.value_width * sizeof(float));
        } else {
          read_row(value + k * params.value_strides.row, params.head_dim_v, state.value_width, to);
        }
      }
      add_few_rows(block, memory.value, state.value_width);
    }
    state.has_output = true;
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
