// A tile of queries in the backward: its rows and those of the output's gradient in fp32, natural and transposed, and
// what the forward said of each row.
#pragma once

#include "cpu/kernel/functions.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

constexpr int kRowStride = kMaxHeadDim + 16;  // neighbouring rows in different cache sets
constexpr int kBiasStride = kTileKeys + 16;

// Besides that of the forward. Rows of a tile beyond its last are zeros.
struct alignas(64) BackwardScratch {
  Scratch forward;                           // queries, scores, mask; `out` is the gradient of the queries
  float query_rows[kTileRows * kRowStride];  // scale * query
  float grad_output_rows[kTileRows * kRowStride];
  float grad_outputs[kMaxHeadDim * kTileRows];     // (head_dim_v, kTileRows)
  float grad_scores[kTileKeys * kScoreStride];     // (keys, kScoreStride), first grad_output * value
  float weights[kTileKeys * kScoreStride];         // before dropout, where there is any
  float cap_slopes[kTileKeys * kScoreStride];      // of softcap, where there is any
  float bias_rows[kTileRows * kBiasStride];        // grad_scores on their way into the gradient of a mask
  float key[kTileKeys * kRowStride];               // where keys cannot be read in place
  float value[kTileKeys * kRowStride];             // the same of values
  float shift[kTileRows], inverse_sum[kTileRows];  // weight = exp(score - shift) * inverse_sum
  float delta[kTileRows];                          // grad_output * output, summed, less the gradient of the logsumexp
  float slope_sums[kTileRows];                     // gradient of each row's slope
  int64_t bias_offset[kTileRows];                  // of each row in the gradient of the mask
  bool written[kMaxRunKeys / kTileKeys];           // of each block of keys: whether its gradients hold anything
};

BackwardScratch& backward_scratch() {
  thread_local std::unique_ptr<BackwardScratch> own(new BackwardScratch);
  return *own;
}

MHA_INLINE int whole_vectors(int width) { return (width + kLanes - 1) / kLanes * kLanes; }

template <typename T>
MHA_INLINE const T* tile_row(const TileState& state, const void* tensor, const Strides3& strides, int r) {
  return row_of<T>(tensor, strides, state.tile.batch, state.rows.head[r], state.tile.query_start + state.rows.query[r]);
}

// Rows of the tile in fp32 times `scale`, and their transpose.
template <typename T>
void load_tile_rows(const TileState& state, const void* tensor, const Strides3& strides, int width, float scale,
                    float* rows, float* columns) {
  const int padded = whole_vectors(width);
  for (int r = 0; r < state.vectors * kLanes; ++r) {
    float* to = rows + r * kRowStride;
    if (r >= state.count) {
      std::memset(to, 0, padded * sizeof(float));
      continue;
    }
    read_row(tile_row<T>(state, tensor, strides, r), width, padded, to);
    if (scale == 1) continue;
    for (int d = 0; d < padded; d += kLanes) store(to + d, load(to + d) * broadcast(scale));
  }
  for (int r = 0; r < state.vectors * kLanes; r += kTransposed) {
    const float* from[kTransposed];
    for (int i = 0; i < kTransposed; ++i) from[i] = rows + (r + i) * kRowStride;
    transpose_rows<kTileRows>(from, width, 1.f, columns + r);
  }
}

template <typename T>
float dot(const float* a, const T* b, int count) {
  Vec sum = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = fma(load(a + i), load_as_float(b + i), sum);
  float tail = 0;
  for (; i < count; ++i) tail += a[i] * to_float(b[i]);
  return sum_lanes(sum) + tail;
}

// Where a row lies in lse and its like.
MHA_INLINE int64_t statistic_at(const TileState& state, int r) {
  const AttentionParams& params = state.params;
  return state.tile.batch * params.row_batch_stride + state.rows.head[r] * params.row_head_stride +
         state.tile.query_start + state.rows.query[r];
}

// What the forward left of each row, and what of its gradient does not depend on the key.
template <typename T>
void load_row_statistics(const AttentionBackwardParams& params, const TileState& state, BackwardScratch& memory) {
  const AttentionParams& forward = params.forward;
  const int rows = state.vectors * kLanes;
  for (int r = 0; r < rows; ++r) {
    memory.shift[r] = std::numeric_limits<float>::max();  // of no query: weights of 0
    memory.inverse_sum[r] = memory.delta[r] = memory.slope_sums[r] = 0;
    if (r >= state.count) continue;
    const int64_t at = statistic_at(state, r);
    memory.shift[r] = forward.row_stats[2 * at];
    memory.inverse_sum[r] = forward.row_stats[2 * at + 1];
    const T* output = tile_row<T>(state, forward.output, forward.output_strides, r);
    memory.delta[r] = dot(memory.grad_output_rows + r * kRowStride, output, forward.head_dim_v);
    if (params.grad_lse) memory.delta[r] -= params.grad_lse[at];
  }
  for (int r = 0; r < rows; r += kLanes) {
    constexpr float kMinusLog2 = -0.69314718056f;
    store(memory.inverse_sum + r, exp_of_negative(load(memory.inverse_sum + r) * broadcast(kMinusLog2)));
  }
}

void write_sink_gradients(const AttentionBackwardParams& params, const TileState& state,
                          const BackwardScratch& memory) {
  for (int r = 0; r < state.count; ++r) {
    const float sink = row_sink<float>(state.params.rule, state.rows.head[r]);
    const float weight = std::exp(sink - memory.shift[r]) * memory.inverse_sum[r];
    params.grad_sink_rows[statistic_at(state, r)] = -weight * memory.delta[r];
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
