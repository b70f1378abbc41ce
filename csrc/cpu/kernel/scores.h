// From products to scores: attention/mask.h's rule, over a block of scores with queries in lanes.
#pragma once

#include "cpu/kernel/functions.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// What is known of the keys first .. first + keys - 1 against a tile.
struct ScoreBlockState {
  int first, keys;
  KeyRange of_vector[kRowVectors];  // keys of this block that some row of a vector sees, counted from `first`
  int first_vector, end_vector;     // those at work
  bool masked;                      // whether attn_mask is more than `true` or 0 here

  // Whether the rule does more to the products than to hide keys beyond bounds.
  bool is_changed(const ScoreRuleParams& rule) const { return masked || rule.softcap != 0 || rule.alibi_slopes; }

  // Whether some row of a vector does not see some key of of_vector.
  bool is_bounded(const Rows& rows, int v) const {
    return first + of_vector[v].begin < rows.full[v].begin || first + of_vector[v].end > rows.full[v].end;
  }
};

ScoreBlockState start_block(const TileState& state, const KeyRange* of_vector, int first, int end) {
  ScoreBlockState block;
  block.first = first;
  block.keys = end - first;
  for (int v = 0; v < state.vectors; ++v) {
    const KeyRange range = of_vector[v].within(first, end);
    block.of_vector[v] = range.empty() ? KeyRange{0, 0} : KeyRange{range.begin - first, range.end - first};
  }
  block.first_vector = 0;
  block.end_vector = state.vectors;
  block.masked = state.params.rule.attn_mask != nullptr;
  return block;
}

void cap_scores(const TileState& state, const ScoreBlockState& block) {
  const float softcap = static_cast<float>(state.params.rule.softcap);
  const Vec cap = broadcast(softcap), inverse = broadcast(static_cast<float>(1 / state.params.rule.softcap));
  float* scores = state.memory.scores;
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      float* at = scores + k * kScoreStride + v * kLanes;
      store(at, cap * tanh(load(at) * inverse));
    }
  }
}

MHA_INLINE float with_mask(float score, uint8_t mask) { return mask ? score : -kInfinity<float>; }
template <typename T>
MHA_INLINE float with_mask(float score, T mask) {
  return masked(score, to_float(mask));
}

MHA_INLINE bool hides(uint8_t mask) { return !mask; }
template <typename T>
MHA_INLINE bool hides(T mask) {
  return to_float(mask) == -kInfinity<float>;
}

template <typename T>
struct Mask {
  const T* data;
  int64_t col_stride;
};

// Whether every row reads the same row of the mask.
MHA_INLINE bool shares_mask_row(const TileState& state) {
  const Strides4& strides = state.params.rule.mask_strides;
  return (strides.row == 0 || state.tile.queries == 1) && (strides.head == 0 || state.tile.heads == 1);
}

// What a mask adds to `count` scores of a row. Without a branch: masks may be random.
MHA_INLINE void read_mask(const uint8_t* from, int64_t col_stride, int count, float* to) {
  constexpr uint32_t kHidden = 0xFF800000u;  // -inf
  int k = 0;
  if (col_stride == 1) {
    for (; k + kLanes <= count; k += kLanes) {
      const IntVec hides = load_bytes(from + k) == IntVec{};
      store(to + k, from_bits(reinterpret_cast<BitVec>(hides) & kHidden));
    }
  }
  for (; k < count; ++k) to[k] = float_from_bits((from[k * col_stride] ? 0u : ~0u) & kHidden);
}
template <typename T>
MHA_INLINE void read_mask(const T* from, int64_t col_stride, int count, float* to) {
  if (col_stride == 1) return read_row(from, count, count, to);
  for (int k = 0; k < count; ++k) to[k] = to_float(from[k * col_stride]);
}

// What the mask adds to the scores of each row of a vector, -inf where a key is hidden: as it lies, or as a copy.
template <typename T>
MHA_INLINE void mask_rows_of_vector(const TileState& state, const ScoreBlockState& block, int v, Mask<T> mask,
                                    const float** rows) {
  for (int i = 0; i < kLanes; ++i) {
    const int r = v * kLanes + i;
    if (r >= state.count) {  // a lane that nobody reads
      rows[i] = rows[0];
      continue;
    }
    const T* from = mask.data + state.rows.mask_offset[r] + block.first * mask.col_stride;
    if constexpr (std::is_same_v<T, float>) {
      if (mask.col_stride == 1) {
        rows[i] = from;
        continue;
      }
    }
    float* copy = state.memory.mask_rows + i * kTileKeys;
    read_mask(from, mask.col_stride, block.keys, copy);
    rows[i] = copy;
  }
}

template <typename T>
void mask_scores(const TileState& state, const ScoreBlockState& block, Mask<T> mask) {
  float* scores = state.memory.scores;
  const Vec hidden = broadcast(-kInfinity<float>);
  if (shares_mask_row(state)) {
    const T* from = mask.data + state.rows.mask_offset[0] + block.first * mask.col_stride;
    for (int k = 0; k < block.keys; ++k) {
      const T each = from[k * mask.col_stride];
      float* at = scores + k * kScoreStride;
      for (int r = block.first_vector * kLanes; r < block.end_vector * kLanes; ++r) at[r] = with_mask(at[r], each);
    }
    return;
  }
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    const float* rows[kLanes];
    mask_rows_of_vector(state, block, v, mask, rows);
    const KeyRange keys = block.of_vector[v];
    float* column = scores + v * kLanes;
    for (int k = keys.begin; k < keys.end; k += kTransposed) {
      const int count = std::min(keys.end - k, kTransposed);
      alignas(64) float bias[kTransposed * kLanes];  // rows of the mask as columns
      for (int r = 0; r < kLanes; r += kTransposed) {
        if (count == kTransposed) {
          transpose_square(rows + r, k, 1.f, bias + r, kLanes);
        } else {
          transpose_rest(rows + r, k, count, 1.f, bias + r, kLanes);
        }
      }
      for (int i = 0; i < count; ++i) {
        float* at = column + (k + i) * kScoreStride;
        const Vec each = load(bias + i * kLanes);
        store(at, each == hidden ? hidden : load(at) + each);
      }
    }
  }
}

// Whether the queries of each head have one mask.
MHA_INLINE bool shares_mask(const TileState& state) {
  const ScoreRuleParams& rule = state.params.rule;
  return rule.attn_mask && (rule.mask_strides.row == 0 || state.tile.queries == 1);
}

// Which of the keys from `first` on some row sees, where no query has a mask of its own: what the others hold may be
// NaN, and must not meet a weight of 0. False where all are seen.
template <typename T>
bool find_hidden_keys(const TileState& state, int first, int keys, Mask<T> mask, uint8_t* seen) {
  bool any_hidden = false;
  for (int k = 0; k < keys; ++k) {
    bool visible = false;
    for (int r = 0; r < state.count && !visible; r += state.tile.queries) {
      const int64_t at = state.rows.mask_offset[r] + (first + k) * mask.col_stride;
      visible = !hides(mask.data[at]);
    }
    seen[k] = visible;
    any_hidden |= !visible;
  }
  return any_hidden;
}

struct VisibleKeys {
  int first, end;
  bool masked;  // whether the mask does anything to the keys in between
};

// Of the keys first .. end - 1, under a mask whose one row all queries read: without those that it hides at either end.
template <typename T>
VisibleKeys visible_part(const TileState& state, int first, int end, Mask<T> mask) {
  float* bias = state.memory.mask_rows;
  read_mask(mask.data + state.rows.mask_offset[0] + first * mask.col_stride, mask.col_stride, end - first, bias);
  int begin = 0, count = end - first, others = 0;
  while (begin < count && bias[begin] == -kInfinity<float>) ++begin;
  while (begin < count && bias[count - 1] == -kInfinity<float>) --count;
  for (int k = begin; k < count; ++k) others += bias[k] != 0;
  return {first + begin, first + count, others > 0};
}

// Calls use(Mask<T>) for the type of the mask.
template <typename Use>
MHA_INLINE auto with_mask_type(const ScoreRuleParams& rule, const Use& use) {
  const int64_t col = rule.mask_strides.col;
  switch (rule.mask_dtype) {
    case DType::kBool: return use(Mask<uint8_t>{static_cast<const uint8_t*>(rule.attn_mask), col});
    case DType::kFloat16: return use(Mask<Float16>{static_cast<const Float16*>(rule.attn_mask), col});
    case DType::kBFloat16: return use(Mask<BFloat16>{static_cast<const BFloat16*>(rule.attn_mask), col});
    default: return use(Mask<float>{static_cast<const float*>(rule.attn_mask), col});
  }
}

void subtract_alibi(const TileState& state, const ScoreBlockState& block) {
  const Rows& rows = state.rows;
  float* scores = state.memory.scores;
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    const IntVec position = load(rows.position + v * kLanes);
    const Vec slope = load(rows.slope + v * kLanes);
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      const IntVec ahead = broadcast(block.first + k) - position;
      const IntVec distance = ahead < IntVec{} ? -ahead : ahead;
      float* at = scores + k * kScoreStride + v * kLanes;
      store(at, fma(-slope, __builtin_convertvector(distance, Vec), load(at)));
    }
  }
}

// Keys beyond a row's bounds.
void hide_out_of_bounds(const TileState& state, const ScoreBlockState& block) {
  const Rows& rows = state.rows;
  float* scores = state.memory.scores;
  const Vec hidden = broadcast(-kInfinity<float>);
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    if (!block.is_bounded(rows, v)) continue;
    const IntVec begin = load(rows.begin + v * kLanes), end = load(rows.end + v * kLanes);
    const KeyRange full = rows.full[v];
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      const int j = block.first + k;
      if (j >= full.begin && j < full.end) {
        k = full.end - block.first - 1;  // the next that some row does not see
        continue;
      }
      float* at = scores + k * kScoreStride + v * kLanes;
      const IntVec key = broadcast(j);
      store(at, ((key >= begin) & (key < end)) ? load(at) : hidden);
    }
  }
}

void apply_rule(const TileState& state, const ScoreBlockState& block) {
  const ScoreRuleParams& rule = state.params.rule;
  if (rule.softcap != 0) cap_scores(state, block);
  if (block.masked) {
    with_mask_type(rule, [&](auto mask) { mask_scores(state, block, mask); });
  }
  if (rule.alibi_slopes) subtract_alibi(state, block);
  if (block.first < state.full.begin || block.first + block.keys > state.full.end) hide_out_of_bounds(state, block);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
