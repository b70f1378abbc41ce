// The gradient of masked_softmax. With P the weights and dP the gradient that reaches them,
//
//   dP = grad_weights + keep / (1 - p) * grad_dropped      delta = sum over j of P dP
//   dS = P (dP - delta + grad_lse), exactly 0 where P is   grad_scores = dS (1 - tanh(score / softcap)^2)
//
// A row of up to 8192 keys is read once and stays in registers; a longer one is read twice, first for its delta.
#pragma once

#include "kernels/masked_softmax.h"
#include "kernels/row_tile.cuh"
#include "launch.h"

namespace mha_ext {

struct MaskedSoftmaxBackwardLaunch {
  int64_t first_row;  // of the first block
  bool packed_rows;   // all tensors can be read and written in packs
};

// weights = P and grads = dP, of one tile.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void load_weights_and_grads(RowTile<Acc, kVecs>& weights, RowTile<Acc, kVecs>& grads,
                                                       const MaskedSoftmaxBackwardParams& params,
                                                       const RowIndex& index,
                                                       const RowColumns<kVecs, kThreads>& columns) {
  const int end = static_cast<int>(params.seqlen_kv);
  for_each_element<kVecs>([&](int vec, int element) { grads[vec][element] = Acc(0); });
  if (params.grad_dropped) {
    load_tile<Acc, kVecs, kThreads>(grads, params.grad_dropped, params.grad_dropped_dtype,
                                    index.offset(params.grad_dropped_strides), columns, 0, end);
    drop_tile<Acc, kVecs, kThreads>(grads, params.dropout, index.batch_head, index.query, columns, end);
  }
  load_tile<Acc, kVecs, kThreads>(weights, params.weights, params.weights_dtype, index.offset(params.weights_strides),
                                  columns, 0, end);
  if (params.grad_weights) {
    read_tile<Acc, kVecs, kThreads>(params.grad_weights, params.grad_weights_dtype,
                                    index.offset(params.grad_weights_strides), columns, 0, end,
                                    [&](int vec, int element, Acc grad) { grads[vec][element] += grad; });
  }
}

// This thread's share of delta. What is not visible may be NaN.
template <typename Acc, int kVecs>
__device__ __forceinline__ Acc dot(const RowTile<Acc, kVecs>& weights, const RowTile<Acc, kVecs>& grads) {
  Acc sum = Acc(0);
  for_each_element<kVecs>([&](int vec, int element) {
    const Acc weight = weights[vec][element];
    if (weight != Acc(0)) sum += weight * grads[vec][element];
  });
  return sum;
}

// Writes grad_scores and grad_bias. Returns this thread's share of the row of the slope's gradient. Both tiles are used up.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc store_score_grads(RowTile<Acc, kVecs>& weights, RowTile<Acc, kVecs>& grads, Acc shift,
                                                 const MaskedSoftmaxBackwardParams& params, const RowIndex& index,
                                                 const RowRule<Acc>& rule,
                                                 const RowColumns<kVecs, kThreads>& columns) {
  for_each_element<kVecs>([&](int vec, int element) {
    const Acc weight = weights[vec][element];
    grads[vec][element] = weight == Acc(0) ? Acc(0) : weight * (grads[vec][element] - shift);
  });
  const int64_t offset = index.offset(params.grad_scores_strides);
  const int end = static_cast<int>(params.seqlen_kv);

  Acc slope_grad = Acc(0);
  if (params.grad_slope_rows) {
    for_each_element<kVecs>([&](int vec, int element) {
      slope_grad -= grads[vec][element] * rule.distance(columns.at(vec, element));
    });
  }
  if (params.grad_bias) {
    store_tile<Acc, kVecs, kThreads>(grads, params.grad_bias, params.grad_dtype, offset, columns, end);
  }
  if (params.scores) {  // through the softcap
    RowTile<Acc, kVecs>& scores = weights;
    load_tile<Acc, kVecs, kThreads>(scores, params.scores, params.scores_dtype, index.offset(params.scores_strides),
                                    columns, 0, end);
    for_each_element<kVecs>([&](int vec, int element) {
      const Acc grad = grads[vec][element];
      grads[vec][element] = grad == Acc(0) ? Acc(0) : grad * rule.capped_slope(scores[vec][element]);
    });
  }
  store_tile<Acc, kVecs, kThreads>(grads, params.grad_scores, params.grad_dtype, offset, columns, end);
  return slope_grad;
}

template <typename Acc>
__device__ __forceinline__ Acc row_value(const void* rows, int64_t row) {
  return rows ? static_cast<const Acc*>(rows)[row] : Acc(0);
}

// The sink's share of a row: the weight that the sink took, times how much the row wants it larger.
template <typename Acc>
__device__ __forceinline__ void store_sink_grad(const MaskedSoftmaxBackwardParams& params, int64_t row, int head,
                                                Acc delta, Acc grad_lse) {
  const Acc lse = static_cast<const Acc*>(params.lse)[row];
  const Acc weight = lse == -kInfinity<Acc> ? Acc(0) : exp(row_sink<Acc>(params.rule, head) - lse);
  static_cast<Acc*>(params.grad_sink_rows)[row] = weight == Acc(0) ? Acc(0) : weight * (grad_lse - delta);
}

// A row in the registers of kWarps warps. A block has several rows of one warp each, or one row.
template <typename Acc, int kVecs, int kWarps, int kRowsPerBlock>
__global__ __launch_bounds__(kWarpSize* kWarps* kRowsPerBlock, min_blocks<Acc>(2 * kVecs, kWarps* kRowsPerBlock))  //
    void masked_softmax_backward_kernel(const __grid_constant__ MaskedSoftmaxBackwardParams params,
                                        const __grid_constant__ MaskedSoftmaxBackwardLaunch launch) {
  static_assert(kWarps == 1 || kRowsPerBlock == 1, "a row shared by several warps has the block to itself");
  constexpr int kThreads = kWarpSize * kWarps;
  __shared__ Acc scratch[kWarps];

  const int64_t row = launch.first_row + int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kThreads;
  if (row >= params.batch * params.heads * params.seqlen_q) return;
  const int thread = threadIdx.x % kThreads;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  const RowColumns<kVecs, kThreads> columns(launch.packed_rows, thread);

  Acc weights[kVecs][kPack], grads[kVecs][kPack];
  load_weights_and_grads<Acc, kVecs, kThreads>(weights, grads, params, index, columns);
  const Acc delta = group_sum<kWarps>(dot<Acc, kVecs>(weights, grads), scratch);
  const Acc grad_lse = row_value<Acc>(params.grad_lse, row);
  Acc slope_grad = store_score_grads<Acc, kVecs, kThreads>(weights, grads, delta - grad_lse, params, index, rule, columns);

  if (params.grad_sink_rows && thread == 0) store_sink_grad(params, row, index.head, delta, grad_lse);
  if (params.grad_slope_rows) {
    slope_grad = group_sum<kWarps>(slope_grad, scratch);
    if (thread == 0) static_cast<Acc*>(params.grad_slope_rows)[row] = slope_grad;
  }
}

// A row of any length, by a block.
template <typename Acc, int kVecs, int kWarps>
__global__ __launch_bounds__(kWarpSize* kWarps, min_blocks<Acc>(2 * kVecs, kWarps))  //
    void masked_softmax_backward_long_kernel(const __grid_constant__ MaskedSoftmaxBackwardParams params,
                                             const __grid_constant__ MaskedSoftmaxBackwardLaunch launch) {
  constexpr int kThreads = kWarpSize * kWarps;
  using Columns = RowColumns<kVecs, kThreads>;
  __shared__ Acc scratch[kWarps];

  const int64_t row = launch.first_row + blockIdx.x;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  const int seqlen_kv = static_cast<int>(params.seqlen_kv);
  Acc weights[kVecs][kPack], grads[kVecs][kPack];

  // first read: delta
  Acc delta = Acc(0);
  for (int begin = 0; begin < seqlen_kv; begin += Columns::kTile) {
    const Columns columns(launch.packed_rows, threadIdx.x, begin);
    load_weights_and_grads<Acc, kVecs, kThreads>(weights, grads, params, index, columns);
    delta += dot<Acc, kVecs>(weights, grads);
  }
  delta = group_sum<kWarps>(delta, scratch);
  const Acc grad_lse = row_value<Acc>(params.grad_lse, row);

  // second read: the gradients
  Acc slope_grad = Acc(0);
  for (int begin = 0; begin < seqlen_kv; begin += Columns::kTile) {
    const Columns columns(launch.packed_rows, threadIdx.x, begin);
    load_weights_and_grads<Acc, kVecs, kThreads>(weights, grads, params, index, columns);
    slope_grad +=
        store_score_grads<Acc, kVecs, kThreads>(weights, grads, delta - grad_lse, params, index, rule, columns);
  }

  if (params.grad_sink_rows && threadIdx.x == 0) store_sink_grad(params, row, index.head, delta, grad_lse);
  if (params.grad_slope_rows) {
    slope_grad = group_sum<kWarps>(slope_grad, scratch);
    if (threadIdx.x == 0) static_cast<Acc*>(params.grad_slope_rows)[row] = slope_grad;
  }
}

template <typename Acc>
void launch_masked_softmax_backward(const MaskedSoftmaxBackwardParams& params, cudaStream_t stream) {
  const auto aligned = [](const void* base, DType dtype, const Strides3& strides) {
    return !base || packs_align(base, dtype, kPack, strides.batch, strides.head, strides.row);
  };
  MaskedSoftmaxBackwardLaunch rows;
  rows.packed_rows = params.seqlen_kv % kPack == 0 &&
                     aligned(params.grad_weights, params.grad_weights_dtype, params.grad_weights_strides) &&
                     aligned(params.grad_dropped, params.grad_dropped_dtype, params.grad_dropped_strides) &&
                     aligned(params.weights, params.weights_dtype, params.weights_strides) &&
                     aligned(params.scores, params.scores_dtype, params.scores_strides) &&
                     aligned(params.grad_scores, params.grad_dtype, params.grad_scores_strides) &&
                     aligned(params.grad_bias, params.grad_dtype, params.grad_scores_strides);

  const auto launch_rows = [&](auto kernel, int warps, int rows_per_block) {
    const int64_t num_rows = params.batch * params.heads * params.seqlen_q;
    for (rows.first_row = 0; rows.first_row < num_rows; rows.first_row += kMaxGrid * rows_per_block) {
      const int64_t blocks = (num_rows - rows.first_row + rows_per_block - 1) / rows_per_block;
      launch(kernel, {"masked_softmax_backward", blocks, kWarpSize * warps * rows_per_block, 0, stream}, params, rows);
    }
  };
  if (params.seqlen_kv <= 256) return launch_rows(masked_softmax_backward_kernel<Acc, 2, 1, 4>, 1, 4);
  if (params.seqlen_kv <= 1024) return launch_rows(masked_softmax_backward_kernel<Acc, 8, 1, 4>, 1, 4);
  if (params.seqlen_kv <= 4096) return launch_rows(masked_softmax_backward_kernel<Acc, 4, 8, 1>, 8, 1);
  if (params.seqlen_kv <= 8192) return launch_rows(masked_softmax_backward_kernel<Acc, 4, 16, 1>, 16, 1);
  launch_rows(masked_softmax_backward_long_kernel<Acc, 2, 16>, 16, 1);
}

}  // namespace mha_ext
