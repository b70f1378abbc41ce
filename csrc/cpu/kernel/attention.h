// Attention of one tile: for each block of keys the scores, their softmax, and the product with the values.
#pragma once

#include "cpu/kernel/products.h"
//
#include "cpu/kernel/few_rows.h"
#include "cpu/kernel/finish.h"
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
void score_rows(const TileState& state, const ScoreBlockState& block, RowsInMemory<float> key) {
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
      const ScoreBlock scores = {key.data + k * key.stride,
                                 key.stride,
                                 memory.queries + first * kLanes,
                                 state.params.head_dim,
                                 memory.scores + k * kScoreStride + first * kLanes,
                                 parts.size(part),
                                 state.rows.largest + first * kLanes};
      with_size<kVectors>(last - first, scores);
    }
    begin = end;
  }
}

// Where a product with values goes: to the tile's own memory, or finished to the output itself.
struct Destination {
  float* rows;  // null: the tile's own memory
  int64_t stride;
};

template <typename T>
void add_values(const TileState& state, const ScoreBlockState& block, const KeyRange* of_group, RowsInMemory<T> value,
                const Destination& output) {
  Scratch& memory = state.memory;
  const int vectors = state.value_width / kLanes;
  const OutputShape shape = output_shape(vectors);
  const EvenParts groups(state.count, shape.rows);
  for (int group = 0; group < groups.parts(); ++group) {
    const int r = groups.begin(group);
    KeyRange keys = of_group[group].within(block.first, block.first + block.keys);
    if (keys.empty()) {
      if (state.has_output && !output.rows) continue;  // nothing to add or to rescale
      keys = {block.first, block.first};
    }
    const int k = keys.begin - block.first;
    float* own = memory.out + r * state.value_width;
    const OutputBlock<T> product = {memory.scores + r + k * kScoreStride,
                                    value.data + k * value.stride,
                                    value.stride,
                                    keys.end - keys.begin,
                                    state.has_output ? state.rows.rescale + r : nullptr,
                                    own,
                                    state.value_width,
                                    output.rows ? state.rows.factor + r : nullptr,
                                    output.rows ? output.rows + r * output.stride : own,
                                    output.rows ? output.stride : state.value_width,
                                    groups.size(group),
                                    vectors};
    with_size<kVectors>(shape.vectors, product);
  }
}

// The keys first .. end - 1, which are the tile's last where `output` is that of the call.
template <typename T>
void attend_block(TileState& state, const KeyRange* of_vector, const KeyRange* of_group, int first, int end,
                  const Destination& output) {
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

  RowsInMemory<float> wide_key;
  if constexpr (kIsFloat<T>) {
    wide_key = key;
  } else {
    wide_key = widen_rows(key, block.keys, params.head_dim, params.head_dim, nullptr, memory.key);
  }
  for (int v = 0; v < state.vectors; v += kVectors) {  // the scores of few vectors stay in the first cache
    block.first_vector = v;
    block.end_vector = std::min(v + kVectors, state.vectors);
    score_rows(state, block, wide_key);
    apply_rule(state, block);
    update_softmax(state, block);
  }
  if (params.dropout.rng_state) drop_weights(state, {memory.scores, 1, kScoreStride, first, block.keys});
  if (output.rows) {
    leave_log2(state);
    finish_softmax(state);
  }

  const bool hidden = masked && shares_mask(state) && with_mask_type(params.rule, [&](auto mask) {
                        return find_hidden_keys(state, first, block.keys, mask, memory.seen);
                      });
  if (!hidden && kIsFloat<T> && state.value_width == params.head_dim_v) {
    add_values(state, block, of_group, value, output);
  } else {
    const uint8_t* seen = hidden ? memory.seen : nullptr;
    add_values(state, block, of_group,
               widen_rows(value, block.keys, params.head_dim_v, state.value_width, seen, memory.value), output);
  }
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
  if (state.count <= kFewRows) {
    attend_few_rows<T>(state, keys);
    return false;
  }
  state.in_log2 = !changes_scores(state.params.rule) && !state.params.row_stats;
  load_queries<T>(state);
  KeyRange of_vector[kRowVectors], of_group[kRowGroups];
  for (int v = 0; v < state.vectors; ++v) of_vector[v] = keys_of_rows(state.rows, v * kLanes, (v + 1) * kLanes);
  const EvenParts groups(state.count, output_shape(state.value_width / kLanes).rows);
  for (int group = 0; group < groups.parts(); ++group) {
    const int r = groups.begin(group);
    of_group[group] = keys_of_rows(state.rows, r, r + groups.size(group));
  }
  const bool direct = kIsFloat<T> && !is_split && state.tile.heads == 1 && state.value_width == state.params.head_dim_v;
  const EvenParts blocks(keys.end - keys.begin, kTileKeys);
  for (int part = 0; part < blocks.parts(); ++part) {
    const int first = keys.begin + blocks.begin(part);
    const bool is_last = part + 1 == blocks.parts();
    Destination output = {nullptr, 0};
    if (direct && is_last) output = {output_row<float>(state, 0), state.params.output_strides.row};
    attend_block<T>(state, of_vector, of_group, first, first + blocks.size(part), output);
  }
  leave_log2(state);
  return direct;
}

template <typename T>
void attend(const AttentionParams& params, const WorkPlan& plan, int64_t unit) {
  const Tile tile = tile_at(params, plan, unit / plan.splits);
  TileState state = start_tile(params, tile);
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

template <typename Use>
void with_element_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat16: return use(Float16{});
    case DType::kBFloat16: return use(BFloat16{});
    default: return use(float{});
  }
}

void run_unit(const AttentionParams& params, const WorkPlan& plan, int64_t unit) {
  with_element_type(params.dtype, [&](auto element) { attend<decltype(element)>(params, plan, unit); });
}

void merge_splits(const AttentionParams& params, const WorkPlan& plan, int64_t tile_index) {
  const Tile tile = tile_at(params, plan, tile_index);
  TileState state = start_tile(params, tile);
  with_element_type(params.dtype, [&](auto element) { merge_tile<decltype(element)>(state, plan, tile_index); });
}

#define MHA_NAME_OF(target) #target
#define MHA_STRING_OF(target) MHA_NAME_OF(target)

}  // namespace

const Kernels kKernels = {MHA_STRING_OF(MHA_CPU_TARGET), &run_unit, &merge_splits};

}  // namespace mha_ext::cpu::MHA_CPU_TARGET
