// Decode: a tile of few rows, the queries of one key head's group, against many keys.
//
//   scores[row][key] = K[key][d] * query[row][d]   d in lanes, lanes summed at the end
//   out[row][d] += weight[row][key] * V[key][d]    d in lanes
//
// K and V are read once, as they lie, and nothing else leaves L1: the time is that of reading them. So the vectors of a
// row may hold its elements in an order of their own, where that saves a shuffle: see load_two().
#pragma once

#include "cpu/kernel/attention_bf16.h"
#include "cpu/kernel/functions.h"
#include "cpu/kernel/products.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/softmax.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Up to this many rows d lies in lanes, above it rows do. Measured with AVX2, 512 keys, D 128, microseconds of a tile
// here and with rows in lanes:
//
//   rows    2         4         6         8         12        16
//   fp32    11 / 26   19 / 31   23 / 30   30 / 35   44 / 44   59 / 51
//   bf16    9 / 41    17 / 34   32 / 36   33 / 49   49 / 55   63 / 58
//
// Rows in lanes cost the same however few lanes are theirs: with 4 lanes they win once all are.
constexpr int kFewRows = kLanes == 4 ? 4 : 8;
constexpr int kFewKeys = 256;  // of a block
constexpr int kBytesAhead = 2048, kKeysAhead = 4;

struct alignas(64) FewRowsMemory {
  float queries[kFewRows * kMaxHeadDim];  // (rows, kMaxHeadDim), what load_factors() makes of them
  float scores[kFewRows * kFewKeys];      // (rows, kFewKeys)
  float bias[kFewKeys];                   // what a mask adds to the scores of a row
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

  MHA_INLINE void store_to(float* to) const {
    store(to, a);
    store(to + kLanes, b);
  }
  MHA_INLINE static Two load_from(const float* from) { return {load(from), load(from + kLanes)}; }
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

// Those of K and of queries, for add_product(): pairs of bf16 stay what they are where there is an instruction for
// them.
#if defined(MHA_CPU_BF16_PAIRS)
struct TwoHalves {
  Vec pairs;

  MHA_INLINE void store_to(float* to) const { store(to, pairs); }
  MHA_INLINE static TwoHalves load_from(const float* from) { return {load(from)}; }
};
template <typename T>
using TwoFactors = std::conditional_t<kInPairs<T>, TwoHalves, Two>;

MHA_INLINE void add_product(TwoHalves x, TwoHalves y, Vec& a, Vec&) { a = Pairs::add(x.pairs, y.pairs, a); }
#else
template <typename T>
using TwoFactors = Two;
#endif
MHA_INLINE void add_product(Two x, Two y, Vec& a, Vec& b) {
  a = fma(x.a, y.a, a);
  b = fma(x.b, y.b, b);
}

template <typename T>
MHA_INLINE TwoFactors<T> load_factors(const T* from) {
  if constexpr (std::is_same_v<TwoFactors<T>, Two>) {
    return load_two(from);
  } else {
    return TwoFactors<T>::load_from(reinterpret_cast<const float*>(from));
  }
}

// A vector of even elements and one of odd elements, in the order in which they stand in memory.
MHA_INLINE Two interleave(Two x) {
#if MHA_CPU_VECTOR_BYTES == 64
  const __m512 low = _mm512_unpacklo_ps(x.a, x.b), high = _mm512_unpackhi_ps(x.a, x.b);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
  return {_mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b)), _mm512_castpd_ps(_mm512_permutex2var_pd(a, last, b))};
#elif MHA_CPU_VECTOR_BYTES == 32
  const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
#else
  return {Vec{x.a[0], x.b[0], x.a[1], x.b[1]}, Vec{x.a[2], x.b[2], x.a[3], x.b[3]}};
#endif
}

// The elements of load_two(), which stand in `row`, in their own order.
template <typename T>
void restore_order(float* row, int width) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int d = 0; d + 2 * kLanes <= width; d += 2 * kLanes) interleave(Two::load_from(row + d)).store_to(row + d);
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
  for (int r = 0; r < state.count; ++r) {
    const T* from = query_row<T>(state, r);
    float* to = memory.queries + r * kMaxHeadDim;
    int d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      load_factors(from + d).store_to(to + d);
    }
    for (; d < head_dim; d += kLanes) store(to + d, load_upto(from + d, head_dim - d));
  }
}

// Calls use(d) for d = 0, 2 * kLanes, ... while as many elements are left of a row; returns the end of them. Unrolled
// where the length is a constant: processors fetch ahead of loads that go through memory in steps of one size, and only
// unrolled does each load do so.
template <int kHeadDim, typename Use>
MHA_INLINE int for_each_two(int head_dim, const Use& use) {
  int d = 0;
  if constexpr (kHeadDim > 0) {
#pragma GCC unroll 16
    for (; d + 2 * kLanes <= kHeadDim; d += 2 * kLanes) use(d);
  } else {
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) use(d);
  }
  return d;
}

// What of K and V is fetched ahead of the processor's own doing, which does not see far enough past the arithmetic on
// several rows, or on 16 bits. For the little arithmetic on a single row in fp32 it does, and fetching would cost 10 %.
template <int kHeadDim, typename T>
MHA_INLINE void prefetch_four_rows(const FewRowsBlock& block, const T* from, int64_t stride, int head_dim) {
  if (kHeadDim > 0 && sizeof(T) == sizeof(float) && block.state.count == 1) return;
  constexpr int kLine = 64 / sizeof(T);
  const int ahead = kHeadDim > 0 ? kBytesAhead / (kHeadDim * static_cast<int>(sizeof(T))) : kKeysAhead;
  for (int i = ahead; i < ahead + 4; ++i) {
    for (int d = 0; d < (kHeadDim > 0 ? kHeadDim : head_dim); d += kLine) __builtin_prefetch(from + i * stride + d);
  }
}

// The scores of kKeys keys, from `k` on, and kRows rows, from `row` on.
template <int kHeadDim, int kKeys, int kRows, typename T>
MHA_INLINE void score_keys(const FewRowsBlock& block, const T* key, int row, int k) {
  constexpr int kSums = kRows == 1 ? 2 : 1;  // a single row has too few sums that do not wait for each other
  const AttentionParams& params = block.state.params;
  const int64_t stride = params.key_strides.row;
  const float* query = block.query_of(row);
  key += k * stride;
  Vec sum[kSums][kRows * kKeys] = {};
  int d = for_each_two<kHeadDim>(params.head_dim, [&](int d) __attribute__((always_inline)) {
    TwoFactors<T> q[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) q[r] = TwoFactors<T>::load_from(query + r * kMaxHeadDim + d);
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const TwoFactors<T> x = load_factors(key + i * stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) add_product(x, q[r], sum[0][r * kKeys + i], sum[kSums - 1][r * kKeys + i]);
    }
  });
  for (; kHeadDim == 0 && d < params.head_dim; d += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Vec x = load_upto(key + i * stride + d, params.head_dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[0][r * kKeys + i] = fma(x, load(query + r * kMaxHeadDim + d), sum[0][r * kKeys + i]);
      }
    }
  }
  const Vec scale = broadcast(params.scale);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    Vec* own = sum[0] + r * kKeys;
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) own[i] = (kSums > 1 ? own[i] + sum[kSums - 1][i] : own[i]) * scale;
    float* to = block.scores_of(row + r) + k;
    if constexpr (kKeys == 4) {
      sum_lanes_of_four(own, to);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) to[i] = sum_lanes(own[i]);
    }
  }
}

template <int kHeadDim, typename T>
void score_few_rows(const FewRowsBlock& block, const T* key) {
  const int count = block.state.count;
  const int64_t stride = block.state.params.key_strides.row;
  int k = 0;
  for (; k + 4 <= block.keys; k += 4) {
    prefetch_four_rows<kHeadDim>(block, key + k * stride, stride, block.state.params.head_dim);
    int r = 0;
    if constexpr (kLanes >= 16) {
      for (; r + 4 <= count; r += 4) score_keys<kHeadDim, 4, 4>(block, key, r, k);
    }
    for (; r + 2 <= count; r += 2) score_keys<kHeadDim, 4, 2>(block, key, r, k);
    if (r < count) score_keys<kHeadDim, 4, 1>(block, key, r, k);
  }
  for (; k < block.keys; ++k) {
    for (int r = 0; r < count; ++r) score_keys<0, 1, 1>(block, key, r, k);
  }
}

template <typename T>
void mask_few_rows(const FewRowsBlock& block, Mask<T> mask) {
  float* bias = block.memory.bias;
  const Vec hidden = broadcast(-kInfinity<float>);
  for (int r = 0; r < block.state.count; ++r) {
    const int64_t offset = block.state.rows.mask_offset[r];
    if (r == 0 || offset != block.state.rows.mask_offset[r - 1]) {
      read_mask(mask.data + offset + block.first * mask.col_stride, mask.col_stride, block.keys, bias);
    }
    float* scores = block.scores_of(r);
    for (int k = 0; k < block.keys; k += kLanes) {
      const Vec each = load(bias + k);
      store(scores + k, each == hidden ? hidden : load(scores + k) + each);
    }
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
template <int kHeadDim, int kKeys, int kRows, typename T>
MHA_INLINE void add_keys(const FewRowsBlock& block, const T* value, int row, int k) {
  const AttentionParams& params = block.state.params;
  const int64_t stride = params.value_strides.row;
  const int width = kHeadDim > 0 ? kHeadDim : block.state.value_width;
  float* out = block.state.memory.out + row * width;
  value += k * stride;
  Vec weight[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) weight[r][i] = broadcast(block.scores_of(row + r)[k + i]);
  }
  int d = for_each_two<kHeadDim>(params.head_dim_v, [&](int d) __attribute__((always_inline)) {
    Two sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = Two::load_from(out + r * width + d);
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Two x = load_two(value + i * stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = {fma(weight[r][i], x.a, sum[r].a), fma(weight[r][i], x.b, sum[r].b)};
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r].store_to(out + r * width + d);
  });
  for (; kHeadDim == 0 && d < params.head_dim_v; d += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Vec x = load_upto(value + i * stride + d, params.head_dim_v - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(out + r * width + d, fma(weight[r][i], x, load(out + r * width + d)));
    }
  }
}

// The values of the block's keys begin .. end - 1.
template <int kHeadDim, typename T>
void add_few_rows(const FewRowsBlock& block, const T* value, int begin, int end) {
  const int count = block.state.count;
  const int64_t stride = block.state.params.value_strides.row;
  int k = begin;
  for (; k + 4 <= end; k += 4) {
    prefetch_four_rows<kHeadDim>(block, value + k * stride, stride, block.state.params.head_dim_v);
    int r = 0;
    if constexpr (kLanes >= 16) {
      for (; r + 4 <= count; r += 4) add_keys<kHeadDim, 4, 4>(block, value, r, k);
    }
    for (; r + 2 <= count; r += 2) add_keys<kHeadDim, 4, 2>(block, value, r, k);
    if (r < count) add_keys<kHeadDim, 4, 1>(block, value, r, k);
  }
  for (; k < end; ++k) {
    for (int r = 0; r < count; ++r) add_keys<0, 1, 1>(block, value, r, k);
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

template <int kHeadDim, typename T>
void attend_few_rows_of(TileState& state, KeyRange keys) {
  const AttentionParams& params = state.params;
  const Tile& tile = state.tile;
  FewRowsMemory& memory = few_rows_memory();
  load_few_queries<T>(state, memory);
  for (int first = keys.begin; first < keys.end; first += kFewKeys) {
    const FewRowsBlock block = {state, memory, first, keys.end - first < kFewKeys ? keys.end - first : kFewKeys};
    const int64_t row = tile.key_start + first;
    score_few_rows<kHeadDim>(block, row_of<T>(params.key, params.key_strides, tile.batch, tile.head_kv, row));
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
      add_few_rows<kHeadDim>(block, value, 0, block.keys);
      continue;
    }
    for (int k = 0; k < block.keys;) {  // what no row sees may be NaN
      int end = k;
      while (end < block.keys && memory.seen[end]) ++end;
      add_few_rows<kHeadDim>(block, value, k, end);
      for (k = end; k < block.keys && !memory.seen[k];) ++k;
    }
  }
  for (int r = 0; r < state.count; ++r) {
    restore_order<T>(state.memory.out + r * state.value_width, params.head_dim_v);
  }
}

template <typename T>
void attend_few_rows(TileState& state, KeyRange keys) {
  const int head_dim = state.params.head_dim;
  if (head_dim == 128 && state.params.head_dim_v == 128) return attend_few_rows_of<128, T>(state, keys);
  if (head_dim == 64 && state.params.head_dim_v == 64) return attend_few_rows_of<64, T>(state, keys);
  attend_few_rows_of<0, T>(state, keys);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
