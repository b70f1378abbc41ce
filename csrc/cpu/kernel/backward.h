// The backward of attention for a run of keys of one head: five products in one pass over the tiles of queries.
//
//   scores      = key * queries             weights      = exp(scores - shift) * inverse_sum
//   products    = value * grad_outputs      grad_scores  = weights * (products - delta)
//   grad_value += weights * grad_output     grad_key    += grad_scores * query     grad_query += grad_scores * key
//
// The gradients of keys and values add up in memory, tile after tile; that of a tile's queries stays in its scratch.
#pragma once

#include "cpu/kernel/backward_products.h"
#include "cpu/kernel/backward_scores.h"
#include "cpu/kernel/backward_tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

struct FloatRows {
  float* data;
  int64_t stride;

  MHA_INLINE FloatRows from(int64_t row) const { return {data + row * stride, stride}; }
};

struct ConstFloatRows {
  const float* data;
  int64_t stride;
};

// A run of keys of one head.
struct KeyRun {
  int64_t batch, key_start;  // of the sequence: its first row in the tensors
  int head_kv;
  int first, end;                  // within the sequence
  FloatRows grad_key, grad_value;  // from the first
};

// keys x dim times columns (dim, kTileRows), where some row sees a key: to (keys, kScoreStride).
void multiply_columns(const TileState& state, const ScoreBlockState& block, ConstFloatRows keys, const float* columns,
                      int dim, float* to) {
  for (int v0 = 0; v0 < state.vectors; v0 += kVectors) {
    const int v1 = v0 + kVectors < state.vectors ? v0 + kVectors : state.vectors;
    KeyRange range = kNoKeys;
    for (int v = v0; v < v1; ++v) widen(range, block.of_vector[v].begin, block.of_vector[v].end);
    for (int k = range.begin; k < range.end; k += kBlock) {
      const int size = range.end - k < kBlock ? range.end - k : kBlock;
      int first = v0, last = v1;  // vectors with a row that sees one of these keys
      const auto sees = [&](int v) { return block.of_vector[v].begin < k + size && block.of_vector[v].end > k; };
      while (first < last && !sees(first)) ++first;
      while (first < last && !sees(last - 1)) --last;
      if (first == last) continue;
      const ScoreBlock product = {keys.data + k * keys.stride,
                                  keys.stride,
                                  columns + first * kLanes,
                                  dim,
                                  to + k * kScoreStride + first * kLanes,
                                  size};
      with_size<kVectors>(last - first, product);
    }
  }
}

// gradient (keys, width) (+)= weights (keys, kScoreStride) * rows (queries, kRowStride)
void add_key_gradients(const TileState& state, const ScoreBlockState& block, const float* weights, const float* rows,
                       FloatRows gradient, int width, bool accumulate) {
  const int vectors = width / kLanes;
  for (int d = 0; d < vectors; d += kVectors) {
    for (int k = 0; k < block.keys; k += kBlock) {
      const int size = block.keys - k < kBlock ? block.keys - k : kBlock;
      int first = 0, last = state.vectors;
      const auto sees = [&](int v) { return block.of_vector[v].begin < k + size && block.of_vector[v].end > k; };
      while (first < last && !sees(first)) ++first;
      while (first < last && !sees(last - 1)) --last;
      if (first == last && accumulate) continue;
      const int begin = first * kLanes, end = last * kLanes < state.count ? last * kLanes : state.count;
      const GradientBlock<kScoreStride, 1> product = {weights + k * kScoreStride + begin,
                                                      rows + begin * kRowStride + d * kLanes,
                                                      kRowStride,
                                                      first < last ? end - begin : 0,
                                                      gradient.data + k * gradient.stride + d * kLanes,
                                                      gradient.stride,
                                                      size,
                                                      accumulate};
      with_size<kVectors>(vectors - d < kVectors ? vectors - d : kVectors, product);
    }
  }
}

// out (queries, width) (+)= grad_scores (keys, kScoreStride) * key (keys, width)
void add_query_gradients(const TileState& state, const ScoreBlockState& block, const KeyRange* of_group,
                         const float* grad_scores, ConstFloatRows key, int width) {
  const int vectors = width / kLanes;
  for (int d = 0; d < vectors; d += kVectors) {
    for (int r = 0, group = 0; r < state.count; r += kBlock, ++group) {
      KeyRange keys = of_group[group].within(block.first, block.first + block.keys);
      if (keys.empty()) {
        if (state.has_output) continue;
        keys = {block.first, block.first};
      }
      const int k = keys.begin - block.first;
      const GradientBlock<1, kScoreStride> product = {grad_scores + k * kScoreStride + r,
                                                      key.data + k * key.stride + d * kLanes,
                                                      key.stride,
                                                      keys.end - keys.begin,
                                                      state.memory.out + r * width + d * kLanes,
                                                      width,
                                                      state.count - r < kBlock ? state.count - r : kBlock,
                                                      state.has_output};
      with_size<kVectors>(vectors - d < kVectors ? vectors - d : kVectors, product);
    }
  }
}

// Rows of keys or values in fp32: as they lie, or copied to whole vectors; those that no query has `seen` are zeros.
template <typename T>
ConstFloatRows float_rows(const T* from, int64_t stride, int count, int width, bool whole, const uint8_t* seen,
                          float* to) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (!seen && (!whole || width % kLanes == 0)) return {from, stride};
  }
  const int padded = whole_vectors(width);
  for (int k = 0; k < count; ++k) {
    if (seen && !seen[k]) {
      std::memset(to + k * kRowStride, 0, padded * sizeof(float));
    } else {
      read_row(from + k * stride, width, padded, to + k * kRowStride);
    }
  }
  return {to, kRowStride};
}

// The keys first .. end - 1 of a run against a tile. bias: of key 0 in the gradient of the mask, or null.
template <typename T>
void differentiate_block(TileState& state, const KeyRun& run, const KeyRange* of_vector, const KeyRange* of_group,
                         int first, int end, float* bias, bool slopes) {
  BackwardScratch& memory = backward_scratch();
  const AttentionParams& params = state.params;
  const ScoreRuleParams& rule = params.rule;
  const ScoreBlockState block = start_block(state, of_vector, first, end);
  const bool hidden = shares_mask(state) && with_mask_type(rule, [&](auto mask) {
                        return find_hidden_keys(state, first, block.keys, mask, state.memory.seen);
                      });
  const int64_t row = run.key_start + first;
  const ConstFloatRows key =
      float_rows(row_of<T>(params.key, params.key_strides, run.batch, run.head_kv, row), params.key_strides.row,
                 block.keys, params.head_dim, true, hidden ? state.memory.seen : nullptr, memory.key);
  const ConstFloatRows value =
      float_rows(row_of<T>(params.value, params.value_strides, run.batch, run.head_kv, row), params.value_strides.row,
                 block.keys, params.head_dim_v, false, nullptr, memory.value);

  multiply_columns(state, block, key, state.memory.queries, params.head_dim, state.memory.scores);
  multiply_columns(state, block, value, memory.grad_outputs, params.head_dim_v, memory.grad_scores);
  if (rule.softcap != 0) keep_cap_slopes(state, block, memory.cap_slopes);
  apply_rule(state, block);
  differentiate_softmax(state, block, memory);
  if (slopes) add_slope_gradients(state, block, memory);
  if (bias) add_bias_gradients(state, block, memory, bias + first);
  if (rule.softcap != 0) apply_cap_slopes(state, block, memory);

  bool& written = memory.written[(first - run.first) / kTileKeys];
  const int64_t at = first - run.first;
  add_key_gradients(state, block, state.memory.scores, memory.grad_output_rows, run.grad_value.from(at),
                    whole_vectors(params.head_dim_v), written);
  add_key_gradients(state, block, memory.grad_scores, memory.query_rows, run.grad_key.from(at),
                    whole_vectors(params.head_dim), written);
  written = true;
  add_query_gradients(state, block, of_group, memory.grad_scores, key, whole_vectors(params.head_dim));
  state.has_output = true;
}

TileState start_backward_tile(const AttentionParams& params, const Tile& tile) {
  Scratch& memory = backward_scratch().forward;
  TileState state = {params, tile, memory, memory.rows, tile.rows(), 0, 0, kNoKeys, kNoKeys, false};
  state.vectors = (state.count + kLanes - 1) / kLanes;
  start_rows(state);
  return state;
}

// Where a part of the gradient of a query lies.
MHA_INLINE float* query_part(const TileState& state, const BackwardPlan& plan, int64_t run, int r) {
  const AttentionParams& params = state.params;
  const int64_t batch = params.cu_seqlens_q ? 1 : params.batch, b = params.cu_seqlens_q ? 0 : state.tile.batch;
  const int64_t head = ((run * batch + b) * params.num_heads_q + state.rows.head[r]) * params.seqlen_q;
  return plan.query_parts + (head + state.tile.query_start + state.rows.query[r]) * params.head_dim;
}

template <typename T>
T* grad_query_row(const AttentionBackwardParams& params, const TileState& state, int r) {
  return const_cast<T*>(tile_row<T>(state, params.grad_query, params.grad_query_strides, r));
}

template <typename T>
void write_query_gradients(const AttentionBackwardParams& params, const BackwardPlan& plan, const TileState& state,
                           int64_t run) {
  const int head_dim = params.forward.head_dim, width = whole_vectors(head_dim);
  for (int r = 0; r < state.count; ++r) {
    const float* from = state.memory.out + r * width;
    if (plan.runs > 1) {
      if (state.has_output) std::memcpy(query_part(state, plan, run, r), from, head_dim * sizeof(float));
    } else if (state.has_output) {
      write_row(from, params.forward.scale, head_dim, grad_query_row<T>(params, state, r));
    } else {
      std::memset(grad_query_row<T>(params, state, r), 0, head_dim * sizeof(T));
    }
  }
}

// To the sums of the tile's heads: (batch, num_heads_q, slope_partials), a partial for each run.
void add_slope_sums(const AttentionBackwardParams& params, const TileState& state, const BackwardScratch& memory,
                    int64_t run) {
  for (int r = 0; r < state.count; r += state.tile.queries) {
    double sum = 0;
    for (int i = 0; i < state.tile.queries; ++i) sum += memory.slope_sums[r + i];
    const int64_t head = state.tile.batch * params.forward.num_heads_q + state.rows.head[r];
    params.grad_slopes[head * params.slope_partials + run] += static_cast<float>(sum);
  }
}

void set_bias_offsets(const AttentionBackwardParams& params, const TileState& state, BackwardScratch& memory) {
  const int64_t seqlen_kv = params.forward.seqlen_kv;
  const int64_t row_stride = params.bias_rows > 1 ? seqlen_kv : 0;
  const int64_t head_stride = params.bias_heads > 1 ? params.bias_rows * seqlen_kv : 0;
  const int64_t batch_stride = params.bias_batch > 1 ? params.bias_heads * params.bias_rows * seqlen_kv : 0;
  for (int r = 0; r < state.count; ++r) {
    memory.bias_offset[r] =
        state.tile.batch * batch_stride + state.rows.head[r] * head_stride + state.rows.query[r] * row_stride;
  }
}

template <typename T>
void differentiate_tile(const AttentionBackwardParams& params, const BackwardPlan& plan, const Tile& tile,
                        const KeyRun& run, int64_t run_index, float* bias) {
  BackwardScratch& memory = backward_scratch();
  const AttentionParams& forward = params.forward;
  TileState state = start_backward_tile(forward, tile);
  const KeyRange keys = state.keys.within(run.first, run.end);
  const bool sinks = params.grad_sink_rows && run_index == 0;
  if (!keys.empty() || sinks) {
    load_tile_rows<T>(state, params.grad_output, params.grad_output_strides, forward.head_dim_v, 1.f,
                      memory.grad_output_rows, memory.grad_outputs);
    load_row_statistics<T>(params, state, memory);
    if (sinks) write_sink_gradients(params, state, memory);
  }
  if (!keys.empty()) {
    load_tile_rows<T>(state, forward.query, forward.query_strides, forward.head_dim, forward.scale, memory.query_rows,
                      state.memory.queries);
    KeyRange of_vector[kRowVectors], of_group[kRowGroups];
    for (int v = 0; v < state.vectors; ++v) of_vector[v] = keys_of_rows(state.rows, v * kLanes, (v + 1) * kLanes);
    for (int r = 0, group = 0; r < state.count; r += kBlock, ++group) {
      of_group[group] = keys_of_rows(state.rows, r, r + kBlock < state.count ? r + kBlock : state.count);
    }
    if (bias) set_bias_offsets(params, state, memory);
    const bool slopes = params.grad_slopes != nullptr;
    // Blocks begin where they do for every tile.
    for (int first = keys.begin - (keys.begin - run.first) % kTileKeys; first < keys.end; first += kTileKeys) {
      const int end = first + kTileKeys < run.end ? first + kTileKeys : run.end;
      differentiate_block<T>(state, run, of_vector, of_group, first, end, bias, slopes);
    }
    if (slopes) add_slope_sums(params, state, memory, run_index);
  }
  write_query_gradients<T>(params, plan, state, run_index);
}

// Where gradients of keys add up: in place where they are fp32 in whole vectors, else in memory of the thread's own.
template <typename T>
FloatRows accumulator(void* gradient, const Strides3& strides, const KeyRun& run, int width, float* own) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (width % kLanes == 0) {
      const float* row = row_of<float>(gradient, strides, run.batch, run.head_kv, run.key_start + run.first);
      return {const_cast<float*>(row), strides.row};
    }
  }
  return {own, whole_vectors(width)};
}

template <typename T>
void finish_key_gradients(const FloatRows& sums, const KeyRun& run, void* gradient, const Strides3& strides,
                          int width) {
  const bool* written = backward_scratch().written;
  for (int k = run.first; k < run.end; ++k) {
    T* to = const_cast<T*>(row_of<T>(gradient, strides, run.batch, run.head_kv, run.key_start + k));
    const float* from = sums.data + (k - run.first) * sums.stride;
    if (!written[(k - run.first) / kTileKeys]) {
      std::memset(to, 0, width * sizeof(T));
    } else if (static_cast<const void*>(from) != to) {
      write_row(from, 1.f, width, to);
    }
  }
}

template <typename T>
void differentiate_run(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t batch, int64_t head_kv,
                       int64_t run_index, float* bias, float* own) {
  const AttentionParams& forward = params.forward;
  const SequenceRows keys = sequence_rows(forward.cu_seqlens_k, batch, forward.seqlen_kv);
  const int64_t first = run_index * plan.run_keys;
  if (run_index > 0 && first >= keys.length) return;
  KeyRun run = {batch, keys.start, static_cast<int>(head_kv), 0, 0, {}, {}};
  run.first = static_cast<int>(first);
  run.end = static_cast<int>(std::min(first + plan.run_keys, keys.length));
  const int64_t own_value = plan.run_keys * round_up(forward.head_dim, kAccumulatorAlign);
  run.grad_key = accumulator<T>(params.grad_key, params.grad_key_strides, run, forward.head_dim, own);
  run.grad_value = accumulator<T>(params.grad_value, params.grad_value_strides, run, forward.head_dim_v,
                                  own ? own + own_value : nullptr);
  const int blocks = (run.end - run.first + kTileKeys - 1) / kTileKeys;
  std::memset(backward_scratch().written, 0, blocks);

  const int64_t length = sequence_rows(forward.cu_seqlens_q, batch, forward.seqlen_q).length;
  const int64_t count = HeadTiles(length, forward.num_heads_q / forward.num_heads_kv).count();
  const int64_t first_tile = forward.cu_seqlens_q ? plan.queries.first_tile[batch] + head_kv * count
                                                  : (batch * forward.num_heads_kv + head_kv) * count;
  for (int64_t each = 0; each < count; ++each) {
    differentiate_tile<T>(params, plan, tile_at(forward, plan.queries, first_tile + each), run, run_index, bias);
  }
  finish_key_gradients<T>(run.grad_key, run, params.grad_key, params.grad_key_strides, forward.head_dim);
  finish_key_gradients<T>(run.grad_value, run, params.grad_value, params.grad_value_strides, forward.head_dim_v);
}

template <typename T>
void differentiate_item(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t item, float* own) {
  const AttentionParams& forward = params.forward;
  const int64_t run = item / plan.chains(), chain = item % plan.chains();
  const int64_t part = chain % plan.bias_parts, slice = chain / plan.bias_parts;
  float* bias = params.grad_bias;
  if (bias) bias += part * params.bias_batch * params.bias_heads * params.bias_rows * forward.seqlen_kv;
  for (int64_t member = part; member < plan.members; member += plan.bias_parts) {
    const int64_t batch = plan.batch_slices > 1 ? slice / plan.head_slices : member / plan.member_heads;
    const int64_t head_kv = plan.head_slices > 1 ? slice % plan.head_slices : member % plan.member_heads;
    differentiate_run<T>(params, plan, batch, head_kv, run, bias, own);
  }
}

// The gradient of a tile's queries, from the parts that its runs of keys left.
template <typename T>
void add_parts(const AttentionBackwardParams& params, const BackwardPlan& plan, const Tile& tile) {
  const AttentionParams& forward = params.forward;
  const TileState state = start_backward_tile(forward, tile);
  const int head_dim = forward.head_dim;
  float* sum = state.memory.out;
  for (int r = 0; r < state.count; ++r) {
    std::memset(sum, 0, head_dim * sizeof(float));
    for (int64_t run = 0; run < plan.runs; ++run) {
      const int64_t first = run * plan.run_keys;
      if (state.keys.begin >= first + plan.run_keys || state.keys.end <= first) continue;
      const float* part = query_part(state, plan, run, r);
      for (int d = 0; d < head_dim; ++d) sum[d] += part[d];
    }
    write_row(sum, forward.scale, head_dim, grad_query_row<T>(params, state, r));
  }
}

}  // namespace

void run_backward_item(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t item, float* own) {
  with_element_type(params.forward.dtype,
                    [&](auto element) { differentiate_item<decltype(element)>(params, plan, item, own); });
}

void add_query_parts(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t tile) {
  with_element_type(params.forward.dtype, [&](auto element) {
    add_parts<decltype(element)>(params, plan, tile_at(params.forward, plan.queries, tile));
  });
}

}  // namespace mha_ext::cpu::MHA_CPU_TARGET
