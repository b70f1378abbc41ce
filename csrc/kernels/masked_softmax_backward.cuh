// The gradient of masked_softmax. With P the weights and dP the gradient that reaches them,
//
//   dP = grad_weights + keep / (1 - p) * grad_dropped      delta = sum over j of P dP
//   dS = P (dP - delta + grad_lse), exactly 0 where P is   grad_scores = dS (1 - tanh(score / softcap)^2)
//
// A row of up to 8192 keys is read once and stays in registers; a longer one is read twice, first for its delta.
#pragma once

#include "kernels/masked_softmax.h"
#include "kernels/row_tile.cuh"

namespace mha_ext {

struct MaskedSoftmaxBackwardRows {
  bool packed;  // all tensors can be read and written in packs
};

// weights = P and grads = dP, of one tile.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void load_weights_and_grads(RowTile<Acc, kVecs>& weights, RowTile<Acc, kVecs>& grads,
                                                       const MaskedSoftmaxBackwardParams& params, const RowIndex& index,
                                                       const RowColumns<Acc, kVecs, kThreads>& columns) {
  const int end = static_cast<int>(params.seqlen_kv);
  for_each_element<kVecs>([&](int vec, int element) { grads[vec][element] = Acc(0); });
  if (params.grad_dropped) {
    load_tile(grads, params.grad_dropped, params.grad_dropped_dtype, index.offset(params.grad_dropped_strides), columns,
              0, end);
    drop_tile(grads, params.dropout, index.batch_head, index.query, columns, end);
  }
  load_tile(weights, params.weights, params.weights_dtype, index.offset(params.weights_strides), columns, 0, end);
  if (params.grad_weights) {
    read_tile<Acc>(params.grad_weights, params.grad_weights_dtype, index.offset(params.grad_weights_strides), columns,
                   0, end, [&](int vec, int element, Acc grad) { grads[vec][element] += grad; });
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

// Writes grad_scores and grad_bias. Returns this thread's share of the row of the slope's gradient. Both tiles are used
// up.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc store_score_grads(RowTile<Acc, kVecs>& weights, RowTile<Acc, kVecs>& grads, Acc shift,
                                                 const MaskedSoftmaxBackwardParams& params, const RowIndex& index,
                                                 const RowRule<Acc>& rule,
                                                 const RowColumns<Acc, kVecs, kThreads>& columns) {
  for_each_element<kVecs>([&](int vec, int element) {
    const Acc weight = weights[vec][element];
    grads[vec][element] = weight == Acc(0) ? Acc(0) : weight * (grads[vec][element] - shift);
  });
  const int64_t offset = index.offset(params.grad_scores_strides);
  const int end = static_cast<int>(params.seqlen_kv);

  Acc slope_grad = Acc(0);
  if (params.grad_slope_rows) {
    for_each_element<kVecs>(
        [&](int vec, int element) { slope_grad -= grads[vec][element] * rule.distance(columns.at(vec, element)); });
  }
  if (params.grad_bias) {
    store_tile(grads, params.grad_bias, params.grad_dtype, offset, columns, end);
  }
  if (params.scores) {  // through the softcap
    RowTile<Acc, kVecs>& scores = weights;
    load_tile(scores, params.scores, params.scores_dtype, index.offset(params.scores_strides), columns, 0, end);
    for_each_element<kVecs>([&](int vec, int element) {
      const Acc grad = grads[vec][element];
      grads[vec][element] = grad == Acc(0) ? Acc(0) : grad * rule.capped_slope(scores[vec][element]);
    });
  }
  store_tile(grads, params.grad_scores, params.grad_dtype, offset, columns, end);
  return slope_grad;
}

template <typename Acc>
__device__ __forceinline__ Acc row_value(const void* rows, int64_t row) {
  return rows ? static_cast<const Acc*>(rows)[row] : Acc(0);
}

// The gradients of the sink, by way of the weight that it took, and of the slope.
template <typename Acc>
__device__ __forceinline__ void store_row_grads(const MaskedSoftmaxBackwardParams& params, int64_t row, int head,
                                                Acc delta, Acc grad_lse, Acc slope_grad) {
  if (params.grad_sink_rows) {
    const Acc lse = static_cast<const Acc*>(params.lse)[row];
    const Acc weight = lse == -kInfinity<Acc> ? Acc(0) : exp(row_sink<Acc>(params.rule, head) - lse);
    static_cast<Acc*>(params.grad_sink_rows)[row] = weight == Acc(0) ? Acc(0) : weight * (grad_lse - delta);
  }
  if (params.grad_slope_rows) static_cast<Acc*>(params.grad_slope_rows)[row] = slope_grad;
}

// A row in registers.
template <typename Block>
__global__ __launch_bounds__(Block::kBlock, Block::min_blocks(2)) void masked_softmax_backward_kernel(
    const __grid_constant__ MaskedSoftmaxBackwardParams params,
    const __grid_constant__ MaskedSoftmaxBackwardRows rows) {
  using Acc = typename Block::Acc;
  __shared__ Acc scratch[Block::kWarps];

  const int64_t row = int64_t{blockIdx.x} * Block::kRows + threadIdx.x / Block::kThreads;
  if (row >= params.batch * params.heads * params.seqlen_q) return;
  const int thread = threadIdx.x % Block::kThreads;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  const typename Block::Columns columns(rows.packed, thread);

  Acc weights[Block::kVecs][kVecColumns], grads[Block::kVecs][kVecColumns];
  load_weights_and_grads(weights, grads, params, index, columns);
  const Acc delta = group_sum<Block::kWarps>(dot(weights, grads), scratch);
  const Acc grad_lse = row_value<Acc>(params.grad_lse, row);
  Acc slope_grad = store_score_grads(weights, grads, delta - grad_lse, params, index, rule, columns);
  if (params.grad_slope_rows) slope_grad = group_sum<Block::kWarps>(slope_grad, scratch);
  if (thread == 0) store_row_grads(params, row, index.head, delta, grad_lse, slope_grad);
}

// A row of any length, by a block.
template <typename Block>
__global__ __launch_bounds__(Block::kBlock, Block::min_blocks(2)) void masked_softmax_backward_long_kernel(
    const __grid_constant__ MaskedSoftmaxBackwardParams params,
    const __grid_constant__ MaskedSoftmaxBackwardRows rows) {
  using Acc = typename Block::Acc;
  using Columns = typename Block::Columns;
  __shared__ Acc scratch[Block::kWarps];

  const int64_t row = blockIdx.x;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  Acc weights[Block::kVecs][kVecColumns], grads[Block::kVecs][kVecColumns];

  // first read: delta
  Acc delta = Acc(0);
  for (int begin = 0; begin < params.seqlen_kv; begin += Columns::kTile) {
    const Columns columns(rows.packed, threadIdx.x, begin);
    load_weights_and_grads(weights, grads, params, index, columns);
    delta += dot(weights, grads);
  }
  delta = group_sum<Block::kWarps>(delta, scratch);
  const Acc grad_lse = row_value<Acc>(params.grad_lse, row);

  // second read: the gradients
  Acc slope_grad = Acc(0);
  for (int begin = 0; begin < params.seqlen_kv; begin += Columns::kTile) {
    const Columns columns(rows.packed, threadIdx.x, begin);
    load_weights_and_grads(weights, grads, params, index, columns);
    slope_grad += store_score_grads(weights, grads, delta - grad_lse, params, index, rule, columns);
  }
  if (params.grad_slope_rows) slope_grad = group_sum<Block::kWarps>(slope_grad, scratch);
  if (threadIdx.x == 0) store_row_grads(params, row, index.head, delta, grad_lse, slope_grad);
}

template <typename Acc>
void launch_masked_softmax_backward(const MaskedSoftmaxBackwardParams& params, cudaStream_t stream) {
  const auto aligned = [](const void* base, DType dtype, const Strides3& strides) {
    return !base || packs_align(base, dtype, kVecColumns, strides.batch, strides.head, strides.row);
  };
  MaskedSoftmaxBackwardRows rows = {};
  rows.packed = params.seqlen_kv % kVecColumns == 0 &&
                aligned(params.grad_weights, params.grad_weights_dtype, params.grad_weights_strides) &&
                aligned(params.grad_dropped, params.grad_dropped_dtype, params.grad_dropped_strides) &&
                aligned(params.weights, params.weights_dtype, params.weights_strides) &&
                aligned(params.scores, params.scores_dtype, params.scores_strides) &&
                aligned(params.grad_scores, params.grad_dtype, params.grad_scores_strides) &&
                aligned(params.grad_bias, params.grad_dtype, params.grad_scores_strides);

  const bool fits = dispatch_row_block<Acc>(params.seqlen_kv, [&](auto block) {
    launch_rows("masked_softmax_backward", masked_softmax_backward_kernel<decltype(block)>, block, params, rows,
                stream);
  });
  if (fits) return;
  using Block = LongRowBlock<Acc>;
  launch_rows("masked_softmax_backward", masked_softmax_backward_long_kernel<Block>, Block{}, params, rows, stream);
}

}  // namespace mha_ext
