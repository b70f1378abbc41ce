// Attention of one tile: for each block of keys the scores, their softmax, and the product with the values.
#pragma once

#include "cpu/kernel/attention_bf16.h"
#include "cpu/kernel/few_rows.h"
#include "cpu/kernel/finish.h"
#include "cpu/kernel/products.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/softmax.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

template <typename T>
constexpr bool kIsFloat = sizeof(T) == sizeof(float);

template <typename T>
struct RowsInMemory {
  const T* data;
  int64_t stride;
};

// Rows in fp32 and whole vectors, for all queries of the tile; those that none of them has `seen` become zeros.
template <typename T>
RowsInMemory<float> widen_rows(RowsInMemory<T> from, int count, int width, int padded, const uint8_t* seen, float* to) {
  for (int k = 0; k < count; ++k) {
    float* row = to + k * padded;
    if (seen && !seen[k]) {
      std::memset(row, 0, padded * sizeof(float));
    } else {
      read_row(from.data + k * from.stride, width, padded, row);
    }
  }
  return {to, padded};
}

// The products of the keys with the queries of the vectors at work.
template <typename Unit>
void score_rows(const TileState& state, const ScoreBlockState& block, RowsInMemory<typename Unit::Element> key) {
  Scratch& memory = state.memory;
  KeyRange keys = kNoKeys;
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    widen(keys, block.of_vector[v].begin, block.of_vector[v].end);
  }
  for (int begin = keys.begin; begin < keys.end;) {
    // A run of keys that the same vectors see.
    int first = block.end_vector, last = block.first_vector, end = keys.end;
    for (int v = block.first_vector; v < block.end_vector; ++v) {
      const KeyRange seen = block.of_vector[v];
      if (seen.end <= begin) continue;
      if (seen.begin > begin) {
        end = std::min(end, seen.begin);
        continue;
      }
      end = std::min(end, seen.end);
      first = std::min(first, v);
      last = std::max(last, v + 1);
    }
    const EvenParts parts(first < last ? end - begin : 0, kBroadcasts[std::max(last - first, 1)]);
    for (int part = 0; part < parts.parts(); ++part) {
      const int k = begin + parts.begin(part);
      const ScoreBlockOf<Unit> scores = {key.data + k * key.stride,
                                         key.stride,
                                         memory.queries + first * kLanes,
                                         state.params.head_dim,
                                         memory.scores + k * kScoreStride + first * kLanes,
                                         parts.size(part),
                                         state.rows.largest + first * kLanes,
                                         state.product_scale()};
      with_size<kVectors>(last - first, scores);
    }
    begin = end;
  }
}

// `output`: of the tile's first row, where what these keys add finishes it.
template <typename T, typename Unit>
void add_values(const TileState& state, const ScoreBlockState& block, const KeyRange* of_group,
                RowsInMemory<float> value, T* output) {
  Scratch& memory = state.memory;
  const int vectors = state.value_width / kLanes;
  const OutputShape shape = output_shape(vectors);
  const EvenParts groups(state.count, shape.rows);
  for (int group = 0; group < groups.parts(); ++group) {
    const int r = groups.begin(group);
    KeyRange keys = of_group[group].within(block.first, block.first + block.keys);
    if (keys.empty()) {
      if (state.has_output && !output) continue;  // nothing to add or to rescale
      keys = {block.first, block.first};
    }
    // In whole steps: where one has a key more, its weight is 0.
    const int begin = (keys.begin - block.first) / Unit::kStep;
    const int end = (keys.end - block.first + Unit::kStep - 1) / Unit::kStep;
    const int64_t output_stride = state.params.output_strides.row;
    const OutputBlock<T, Unit> product = {memory.scores + r + begin * kScoreStride,
                                          value.data + begin * value.stride,
                                          value.stride,
                                          end - begin,
                                          state.has_output ? state.rows.rescale + r : nullptr,
                                          memory.out + r * state.value_width,
                                          state.value_width,
                                          output ? output + r * output_stride : nullptr,
                                          state.rows.factor + r,
                                          output_stride,
                                          groups.size(group),
                                          vectors};
    with_size<kVectors>(shape.vectors, product);
  }
}

// The keys first .. end - 1, which are the tile's last where `output` is given.
template <typename T>
void attend_block(TileState& state, const KeyRange* of_vector, const KeyRange* of_group, int first, int end,
                  T* output) {
  const AttentionParams& params = state.params;
  const Tile& tile = state.tile;
  Scratch& memory = state.memory;
  bool masked = params.rule.attn_mask;
  if (masked && shares_mask_row(state)) {
    const VisibleKeys visible =
        with_mask_type(params.rule, [&](auto mask) { return visible_part(state, first, end, mask); });
    first = visible.first;
    end = visible.end;
    masked = visible.masked;
  }
  ScoreBlockState block = start_block(state, of_vector, first, end);
  block.masked = masked;
  const RowsInMemory<T> key = {
      row_of<T>(params.key, params.key_strides, tile.batch, tile.head_kv, tile.key_start + first),
      params.key_strides.row};
  const RowsInMemory<T> value = {
      row_of<T>(params.value, params.value_strides, tile.batch, tile.head_kv, tile.key_start + first),
      params.value_strides.row};

  using Unit = UnitOf<T>;
  RowsInMemory<typename Unit::Element> keys;
  if constexpr (std::is_same_v<T, typename Unit::Element>) {
    keys = key;
    if constexpr (kInPairs<T>) {
      if (params.head_dim % 2 != 0) {
        auto* padded = reinterpret_cast<T*>(memory.key);
        PairProducts<T>::pad_keys(key.data, key.stride, block.keys, params.head_dim, padded);
        keys = {padded, params.head_dim + 1};
      }
    }
  } else {
    keys = widen_rows(key, block.keys, params.head_dim, params.head_dim, nullptr, memory.key);
  }
  for (int v = 0; v < state.vectors; v += kVectors) {  // the scores of few vectors stay in the first cache
    block.first_vector = v;
    block.end_vector = std::min(v + kVectors, state.vectors);
    score_rows<Unit>(state, block, keys);
    apply_rule(state, block);
    update_softmax(state, block);
  }
  if (params.dropout.rng_state) drop_weights(state, {memory.scores, 1, kScoreStride, first, block.keys});
  if (output) {
    leave_log2(state);
    finish_softmax(state);
  }

  const bool hidden = masked && shares_mask(state) && with_mask_type(params.rule, [&](auto mask) {
                        return find_hidden_keys(state, first, block.keys, mask, memory.seen);
                      });
  const uint8_t* seen = hidden ? memory.seen : nullptr;
  RowsInMemory<float> values = {memory.value, state.value_width};
  if constexpr (kInPairs<T>) {
    PairProducts<T>::load_weights(state, block);
    if (state.packed_values && first % 2 == 0 && end % 2 == 0) {  // else a pair would hold a key that no row sees
      values.data = state.packed_values + int64_t{first / Unit::kStep} * state.value_width;
    } else {
      PairProducts<T>::load_values(value.data, value.stride, block.keys, params.head_dim_v, state.value_width, seen,
                                   memory.value);
    }
  } else if (!hidden && kIsFloat<T> && state.value_width == params.head_dim_v) {
    values = {reinterpret_cast<const float*>(value.data), value.stride};
  } else {
    widen_rows(value, block.keys, params.head_dim_v, state.value_width, seen, memory.value);
  }
  add_values<T, Unit>(state, block, of_group, values, output);
  state.has_output = true;
}

TileState start_tile(const AttentionParams& params, const Tile& tile) {
  Scratch& memory = scratch();
  TileState state = {params, tile, memory, memory.rows, tile.rows(), 0, 0, kNoKeys, kNoKeys, false};
  state.vectors = (state.count + kLanes - 1) / kLanes;
  state.value_width = (params.head_dim_v + kLanes - 1) / kLanes * kLanes;
  start_rows(state);
  return state;
}

// What the keys of a split, or all, add to a tile. True where the output is finished already.
template <typename T>
bool attend_keys(TileState& state, KeyRange keys, bool is_split) {
  if (keys.empty()) return false;
  // A backward computes its scores as below, and large ones only cancel against a shift of the same rounding.
  if (state.count <= kFewRows && !state.params.row_stats) {
    attend_few_rows<T>(state, keys);
    return false;
  }
  state.in_log2 = !changes_scores(state.params.rule) && !state.params.row_stats;
  if constexpr (kInPairs<T>) {
    PairProducts<T>::load_queries(state);
  } else {
    load_queries<T>(state);
  }
  KeyRange of_vector[kRowVectors], of_group[kRowGroups];
  for (int v = 0; v < state.vectors; ++v) of_vector[v] = keys_of_rows(state.rows, v * kLanes, (v + 1) * kLanes);
  const EvenParts groups(state.count, output_shape(state.value_width / kLanes).rows);
  for (int group = 0; group < groups.parts(); ++group) {
    const int r = groups.begin(group);
    of_group[group] = keys_of_rows(state.rows, r, r + groups.size(group));
  }
  const bool direct = !is_split && state.tile.heads == 1 && state.value_width == state.params.head_dim_v;
  constexpr int kStep = UnitOf<T>::kStep;  // all blocks but the last are of whole steps
  const EvenParts blocks((keys.end - keys.begin + kStep - 1) / kStep, kTileKeys / kStep);
  for (int part = 0; part < blocks.parts(); ++part) {
    const int first = keys.begin + kStep * blocks.begin(part);
    const int end = std::min(first + kStep * blocks.size(part), keys.end);
    T* output = direct && end == keys.end ? output_row<T>(state, 0) : nullptr;
    attend_block<T>(state, of_vector, of_group, first, end, output);
  }
  leave_log2(state);
  return direct;
}

template <typename T>
void attend(const AttentionParams& params, const WorkPlan& plan, int64_t unit) {
  const Tile tile = tile_at(params, plan, unit / plan.splits);
  TileState state = start_tile(params, tile);
  if (plan.packed_values) {
    const int64_t head = tile.batch * params.num_heads_kv + tile.head_kv;
    state.packed_values = plan.packed_values + head * ((params.seqlen_kv + 1) / 2) * state.value_width;
  }
  if (plan.splits == 1) {
    if (attend_keys<T>(state, state.keys, false)) return;
    finish_softmax(state);
    write_outputs<T>(state);
    return;
  }
  KeyRange keys = state.keys;
  if (!keys.empty()) {
    const int blocks = (keys.end - keys.begin + kTileKeys - 1) / kTileKeys;
    const int64_t each = int64_t{(blocks + plan.splits - 1) / plan.splits} * kTileKeys;
    const int64_t begin = keys.begin + unit % plan.splits * each;
    keys = keys.within(static_cast<int>(std::min<int64_t>(begin, keys.end)),
                       static_cast<int>(std::min<int64_t>(begin + each, keys.end)));
  }
  attend_keys<T>(state, keys, true);
  store_partial(state, plan, unit);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
