// Decode: a tile of few rows, the queries of one key head's group, against many keys.
//
//   scores[row][key] = K[key][d] * query[row][d]   d in lanes, lanes summed at the end
//   out[row][d] += weight[row][key] * V[key][d]    d in lanes
//
// K and V are read once, as they lie, and nothing else leaves L1: the time is that of reading them. So the vectors of a
// row may hold its elements in an order of their own, where that saves a shuffle: see load_two().
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
constexpr int kFewKeys = 256;  // of a block
constexpr int kDotKeys = 32;   // whose products wait for their lanes to be summed
// Each load of K and V should go through memory in steps of one size: processors fetch ahead of such loads only. What
// is fetched here as well hides that a row's arithmetic fills most of the window of out-of-order execution.
constexpr int kBytesAhead = 1024;
constexpr int kKeysAhead = 8;

struct alignas(64) FewRowsMemory {
  float queries[kFewRows * kMaxHeadDim];  // scale * query: (rows, whole vectors)
  float scores[kFewRows * kFewKeys];      // (rows, kFewKeys)
  Vec products[kFewRows * kDotKeys];      // (rows, kDotKeys): of queries and keys, lanes not summed yet
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
  const float* query_of(int r) const { return memory.queries + r * kMaxHeadDim; }
};

// 2 * kLanes elements of a row.
struct Two {
  Vec a, b;
};

template <typename T>
MHA_INLINE Two load_two(const T* from) {
  return {load_as_float(from), load_as_float(from + kLanes)};
}

// Even elements, odd elements.
MHA_INLINE Two load_two(const BFloat16* from) {
  BitVec x;
  std::memcpy(&x, from, sizeof(x));
  return {from_bits(x << 16), from_bits(x & 0xFFFF0000u)};
}

// Fetches what stands kBytesAhead of 4 * kLanes elements.
template <typename T>
MHA_INLINE void prefetch_four(const T* from) {
#pragma GCC unroll 4
  for (int d = 0; d < 4 * kLanes; d += 64 / sizeof(T)) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + d) + kBytesAhead);
  }
}

// The elements of load_two(), which stand in `row`, in their own order.
template <typename T>
void restore_order(float* row, int width) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (; width >= 2 * kLanes; width -= 2 * kLanes, row += 2 * kLanes) {
      float both[2 * kLanes];
      std::memcpy(both, row, sizeof(both));
      for (int i = 0; i < kLanes; ++i) {
        row[2 * i] = both[i];
        row[2 * i + 1] = both[kLanes + i];
      }
    }
  }
}

// The last vector of a row, or one in it: `count` elements, then zeros.
template <typename T>
MHA_INLINE Vec load_upto(const T* from, int count) {
  if (count >= kLanes) return load_as_float(from);
  float x[kLanes] = {};
  for (int i = 0; i < count; ++i) x[i] = to_float(from[i]);
  return load(x);
}

template <typename T>
void load_few_queries(const TileState& state, FewRowsMemory& memory) {
  const int head_dim = state.params.head_dim;
  const Vec scale = broadcast(state.params.scale);
  for (int r = 0; r < state.count; ++r) {
    const T* from = query_row<T>(state, r);
    float* to = memory.queries + r * kMaxHeadDim;
    int d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      const Two x = load_two(from + d);
      store(to + d, x.a * scale);
      store(to + d + kLanes, x.b * scale);
    }
    for (; d < head_dim; d += kLanes) store(to + d, load_upto(from + d, head_dim - d) * scale);
  }
}

// Products of one key and kRows rows, from `row` on; their lanes are still to be summed.
template <int kRows, typename T>
MHA_INLINE void multiply_key(const FewRowsBlock& block, const T* key, int row, Vec* products) {
  constexpr int kSums = kRows <= 2 ? 4 : 2;  // of a row, that do not wait for each other
  const int head_dim = block.state.params.head_dim;
  const float* query = block.query_of(row);
  Vec sum[kRows][kSums] = {};
  const auto multiply_two = [&](int d, int at) __attribute__((always_inline)) {
    const Two x = load_two(key + d);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sum[r][at] = fma(x.a, load(query + r * kMaxHeadDim + d), sum[r][at]);
      sum[r][at + 1] = fma(x.b, load(query + r * kMaxHeadDim + d + kLanes), sum[r][at + 1]);
    }
  };
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    prefetch_four(key + d);
    multiply_two(d, 0);
    multiply_two(d + 2 * kLanes, kSums - 2);
  }
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) multiply_two(d, 0);
  for (; d < head_dim; d += kLanes) {
    const Vec x = load_upto(key + d, head_dim - d);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r][0] = fma(x, load(query + r * kMaxHeadDim + d), sum[r][0]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    for (int at = 2; at < kSums; ++at) sum[r][at - 2] += sum[r][at];
    products[(row + r) * kDotKeys] = sum[r][0] + sum[r][1];
  }
}

template <typename T>
void score_few_rows(const FewRowsBlock& block, const T* key) {
  const int count = block.state.count;
  const int64_t stride = block.state.params.key_strides.row;
  Vec* products = block.memory.products;
  for (int first = 0; first < block.keys; first += kDotKeys) {
    const int keys = block.keys - first < kDotKeys ? block.keys - first : kDotKeys;
    for (int k = 0; k < keys; ++k, key += stride) {
      int r = 0;
      for (; r + 4 <= count; r += 4) multiply_key<4>(block, key, r, products + k);
      for (; r + 2 <= count; r += 2) multiply_key<2>(block, key, r, products + k);
      if (r < count) multiply_key<1>(block, key, r, products + k);
    }
    for (int r = 0; r < count; ++r) {
      for (int k = 0; k < keys; k += 4) sum_lanes_of_four(products + r * kDotKeys + k, block.scores_of(r) + first + k);
    }
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

// out[row][d] += weight[row][key] * V[key][d] for kKeys keys, from `k` on, and kRows rows, from `row` on. Weights lie
// in registers and the output in L1, so that V is read along its rows.
template <int kKeys, int kRows, typename T>
MHA_INLINE void add_keys(const FewRowsBlock& block, const T* value, int row, int k) {
  const int64_t stride = block.state.params.value_strides.row;
  const int head_dim = block.state.params.head_dim_v, width = block.state.value_width;
  float* out = block.state.memory.out + row * width;
  value += k * stride;
  Vec weight[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) weight[r][i] = broadcast(block.scores_of(row + r)[k + i]);
  }
  const auto add_two = [&](int d) __attribute__((always_inline)) {
    Two sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = {load(out + r * width + d), load(out + r * width + d + kLanes)};
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Two x = load_two(value + i * stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = {fma(weight[r][i], x.a, sum[r].a), fma(weight[r][i], x.b, sum[r].b)};
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      store(out + r * width + d, sum[r].a);
      store(out + r * width + d + kLanes, sum[r].b);
    }
  };
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    if (kKeys == 1) prefetch_four(value + d);
    add_two(d);
    add_two(d + 2 * kLanes);
  }
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) add_two(d);
  for (; d < head_dim; d += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Vec x = load_upto(value + i * stride + d, head_dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(out + r * width + d, fma(weight[r][i], x, load(out + r * width + d)));
    }
  }
}

// The values of the block's keys begin .. end - 1.
template <typename T>
void add_few_rows(const FewRowsBlock& block, const T* value, int begin, int end) {
  const int count = block.state.count;
  int k = begin;
  if (count > 1) {
    const int64_t stride = block.state.params.value_strides.row;
    for (; k + 4 <= end; k += 4) {
      for (int i = 0; i < 4; ++i) {
        for (int d = 0; d < block.state.params.head_dim_v; d += 64 / sizeof(T)) {
          __builtin_prefetch(value + (k + i + kKeysAhead) * stride + d);
        }
      }
      int r = 0;
      if constexpr (kLanes >= 16) {
        for (; r + 4 <= count; r += 4) add_keys<4, 4>(block, value, r, k);
      }
      for (; r + 2 <= count; r += 2) add_keys<4, 2>(block, value, r, k);
      if (r < count) add_keys<4, 1>(block, value, r, k);
    }
  }
  for (; k < end; ++k) {
    for (int r = 0; r < count; ++r) add_keys<1, 1>(block, value, r, k);
  }
}

void rescale_few_rows(const TileState& state) {
  const int width = state.value_width;
  float* out = state.memory.out;
  if (!state.has_output) {
    std::memset(out, 0, state.count * width * sizeof(float));
    return;
  }
  for (int r = 0; r < state.count; ++r) {
    const Vec factor = broadcast(state.rows.rescale[r]);
    for (int d = 0; d < width; d += kLanes) store(out + r * width + d, load(out + r * width + d) * factor);
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

    rescale_few_rows(state);
    state.has_output = true;
    const T* value = row_of<T>(params.value, params.value_strides, tile.batch, tile.head_kv, row);
    const bool hidden = shares_mask(state) && with_mask_type(params.rule, [&](auto mask) {
                          return find_hidden_keys(state, first, block.keys, mask, memory.seen);
                        });
    if (!hidden) {
      add_few_rows(block, value, 0, block.keys);
      continue;
    }
    for (int k = 0; k < block.keys;) {  // what no row sees may be NaN
      int end = k;
      while (end < block.keys && memory.seen[end]) ++end;
      add_few_rows(block, value, k, end);
      for (k = end; k < block.keys && !memory.seen[k];) ++k;
    }
  }
  for (int r = 0; r < state.count; ++r) {
    restore_order<T>(state.memory.out + r * state.value_width, params.head_dim_v);
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
