// weights = softmax over the visible keys of each row of scores: one read, one write.
//
// A row of up to 8192 keys stays in the registers of a warp or of a block. A longer one is read twice: once for its
// largest score and its sum, once for its weights.
#pragma once

#include "attention/online_softmax.h"
#include "kernels/masked_softmax.h"
#include "kernels/row_tile.cuh"

namespace mha_ext {

struct MaskedSoftmaxRows {
  bool packed;       // scores, weights and dropped can be read and written in packs
  bool packed_mask;  // and so can the mask
};

// scores = scores under the mask
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void apply_mask(RowTile<Acc, kVecs>& scores, const ScoreRuleParams& params,
                                           const RowRule<Acc>& rule, const RowColumns<Acc, kVecs, kThreads>& columns,
                                           bool packed_mask) {
  const auto apply = [&](auto type) {
    using T = typename decltype(type)::type;
    const T* row = static_cast<const T*>(params.attn_mask) + rule.mask_offset;
    const auto put = [&](int vec, int element, T value) {
      scores[vec][element] = masked(scores[vec][element], mask_value<Acc>(value));
    };
    if (packed_mask) {
      read_row(row, columns, rule.begin, rule.end, put);
    } else {
      for_each_element<kVecs>([&](int vec, int element) {
        const int column = columns.at(vec, element);
        if (rule.in_bounds(column)) put(vec, element, row[column * params.mask_strides.col]);
      });
    }
  };
  switch (params.mask_dtype) {
    case DType::kBool: return apply(Type<bool>{});
    case DType::kFloat16: return apply(Type<__half>{});
    case DType::kBFloat16: return apply(Type<__nv_bfloat16>{});
    case DType::kFloat32: return apply(Type<float>{});
    case DType::kFloat64: return apply(Type<double>{});
  }
}

// The scores of one tile as attention/mask.h defines them, -inf where a key is not visible. Returns the largest that
// this thread holds, NaN if one is NaN.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc load_scores(RowTile<Acc, kVecs>& scores, const MaskedSoftmaxParams& params,
                                           const MaskedSoftmaxRows& rows, const RowIndex& index,
                                           const RowRule<Acc>& rule, const RowColumns<Acc, kVecs, kThreads>& columns) {
  load_tile(scores, params.scores, params.scores_dtype, index.offset(params.scores_strides), columns, rule.begin,
            rule.end);
  if (rule.softcap != Acc(0)) {
    for_each_element<kVecs>([&](int vec, int element) { scores[vec][element] = rule.capped(scores[vec][element]); });
  }
  if (params.rule.attn_mask) apply_mask(scores, params.rule, rule, columns, rows.packed_mask);
  if (params.rule.alibi_slopes) {
    for_each_element<kVecs>(
        [&](int vec, int element) { scores[vec][element] -= rule.slope * rule.distance(columns.at(vec, element)); });
  }

  Acc largest = -kInfinity<Acc>;
  bool has_nan = false;
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (!columns.within(vec, rule.begin, rule.end)) {
#pragma unroll
      for (int element = 0; element < kVecColumns; ++element) {
        if (!rule.in_bounds(columns.at(vec, element))) scores[vec][element] = -kInfinity<Acc>;
      }
    }
#pragma unroll
    for (int element = 0; element < kVecColumns; ++element) {
      largest = fmax(largest, scores[vec][element]);  // passes over NaN
      has_nan |= scores[vec][element] != scores[vec][element];
    }
  }
  return has_nan ? kNaN<Acc> : largest;
}

// tile = exp(tile - shift). Returns the sum of what this thread holds.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc exponentiate(RowTile<Acc, kVecs>& tile, Acc shift, const RowRule<Acc>& rule,
                                            const RowColumns<Acc, kVecs, kThreads>& columns) {
  if (shift != shift) {  // a NaN row, but for the keys that are not visible
    for_each_element<kVecs>(
        [&](int vec, int element) { tile[vec][element] = tile[vec][element] == -kInfinity<Acc> ? Acc(0) : shift; });
    return shift;
  }
  Acc sum = Acc(0);
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (columns.overlaps(vec, rule.begin, rule.end)) {
#pragma unroll
      for (int element = 0; element < kVecColumns; ++element) {
        tile[vec][element] = exp(tile[vec][element] - shift);
        sum += tile[vec][element];
      }
    } else {
#pragma unroll
      for (int element = 0; element < kVecColumns; ++element) tile[vec][element] = Acc(0);
    }
  }
  return sum;
}

// Writes weights and dropped, from exp(score - shift). Returns this thread's share of the entropy if that is asked for.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc store_weights(RowTile<Acc, kVecs>& tile, const MaskedSoftmaxParams& params,
                                             const RowIndex& index, Acc inverse_sum,
                                             const RowColumns<Acc, kVecs, kThreads>& columns) {
  for_each_element<kVecs>([&](int vec, int element) { tile[vec][element] *= inverse_sum; });
  const int64_t offset = index.offset(params.weights_strides);
  const int end = static_cast<int>(params.seqlen_kv);
  store_tile(tile, params.weights, params.weights_dtype, offset, columns, end);

  Acc entropy = Acc(0);
  if (params.entropy) {
    for_each_element<kVecs>([&](int vec, int element) {
      const Acc weight = tile[vec][element];
      if (weight != Acc(0)) entropy -= weight * log(weight);
    });
  }
  if (params.dropped) {
    drop_tile(tile, params.dropout, index.batch_head, index.query, columns, end);
    store_tile(tile, params.dropped, params.weights_dtype, offset, columns, end);
  }
  return entropy;
}

template <typename Acc>
__device__ __forceinline__ void store_row_results(const MaskedSoftmaxParams& params, int64_t row, Acc lse,
                                                  Acc max_score, Acc entropy) {
  static_cast<Acc*>(params.lse)[row] = lse;
  if (params.max_score) static_cast<Acc*>(params.max_score)[row] = max_score;
  if (params.entropy) static_cast<Acc*>(params.entropy)[row] = entropy;
}

// A row in registers.
template <typename Block>
__global__ __launch_bounds__(Block::kBlock, Block::min_blocks(1)) void masked_softmax_kernel(
    const __grid_constant__ MaskedSoftmaxParams params, const __grid_constant__ MaskedSoftmaxRows rows) {
  using Acc = typename Block::Acc;
  __shared__ Acc scratch[Block::kWarps];

  const int64_t row = int64_t{blockIdx.x} * Block::kRows + threadIdx.x / Block::kThreads;
  if (row >= params.batch * params.heads * params.seqlen_q) return;
  const int thread = threadIdx.x % Block::kThreads;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  const typename Block::Columns columns(rows.packed, thread);

  Acc tile[Block::kVecs][kVecColumns];
  const Acc largest = load_scores(tile, params, rows, index, rule, columns);
  const Acc max_score = group_reduce<Block::kWarps>(largest, scratch, max_or_nan<Acc>);
  const Acc sink = row_sink<Acc>(params.rule, index.head);
  const Acc shift = softmax_shift(max_or_nan(max_score, sink));
  const Acc sum = group_sum<Block::kWarps>(exponentiate(tile, shift, rule, columns), scratch);
  const SoftmaxRow<Acc> result(shift, sum + exp(sink - shift));

  Acc entropy = store_weights(tile, params, index, result.inverse_sum, columns);
  if (params.entropy) entropy = group_sum<Block::kWarps>(entropy, scratch);
  if (thread == 0) store_row_results(params, row, result.lse, max_score, entropy);
}

// A row of any length, by a block.
template <typename Block>
__global__ __launch_bounds__(Block::kBlock, Block::min_blocks(1)) void masked_softmax_long_kernel(
    const __grid_constant__ MaskedSoftmaxParams params, const __grid_constant__ MaskedSoftmaxRows rows) {
  using Acc = typename Block::Acc;
  using Columns = typename Block::Columns;
  __shared__ Acc scratch[Block::kWarps];

  const int64_t row = blockIdx.x;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  Acc tile[Block::kVecs][kVecColumns];

  // first read: the largest score and the sum
  SoftmaxState<Acc> state;
  for (int begin = rule.begin / Columns::kTile * Columns::kTile; begin < rule.end; begin += Columns::kTile) {
    const Columns columns(rows.packed, threadIdx.x, begin);
    const Acc largest = load_scores(tile, params, rows, index, rule, columns);
    state.rescale(max_or_nan(state.max, largest));
    state.sum += exponentiate(tile, softmax_shift(state.max), rule, columns);
  }
  const Acc max_score = group_reduce<Block::kWarps>(state.max, scratch, max_or_nan<Acc>);
  const Acc sink = row_sink<Acc>(params.rule, index.head);
  const Acc shift = softmax_shift(max_or_nan(max_score, sink));
  state.rescale(max_or_nan(max_score, sink));
  const Acc sum = group_sum<Block::kWarps>(state.sum, scratch);
  const SoftmaxRow<Acc> result(shift, sum + exp(sink - shift));

  // second read: the weights
  Acc entropy = Acc(0);
  for (int begin = 0; begin < params.seqlen_kv; begin += Columns::kTile) {
    const Columns columns(rows.packed, threadIdx.x, begin);
    load_scores(tile, params, rows, index, rule, columns);
    exponentiate(tile, shift, rule, columns);
    entropy += store_weights(tile, params, index, result.inverse_sum, columns);
  }
  if (params.entropy) entropy = group_sum<Block::kWarps>(entropy, scratch);
  if (threadIdx.x == 0) store_row_results(params, row, result.lse, max_score, entropy);
}

template <typename Acc>
void launch_masked_softmax(const MaskedSoftmaxParams& params, cudaStream_t stream) {
  const auto aligned = [](const void* base, DType dtype, const Strides3& strides) {
    return packs_align(base, dtype, kVecColumns, strides.batch, strides.head, strides.row);
  };
  const ScoreRuleParams& rule = params.rule;
  const Strides4& mask = rule.mask_strides;
  MaskedSoftmaxRows rows = {};
  rows.packed = params.seqlen_kv % kVecColumns == 0 &&
                aligned(params.scores, params.scores_dtype, params.scores_strides) &&
                aligned(params.weights, params.weights_dtype, params.weights_strides) &&
                (!params.dropped || aligned(params.dropped, params.weights_dtype, params.weights_strides));
  rows.packed_mask = rows.packed && rule.attn_mask && mask.col == 1 &&
                     aligned(rule.attn_mask, rule.mask_dtype, {mask.batch, mask.head, mask.row});

  const bool fits = dispatch_row_block<Acc>(params.seqlen_kv, [&](auto block) {
    launch_rows("masked_softmax", masked_softmax_kernel<decltype(block)>, block, params, rows, stream);
  });
  if (fits) return;
  using Block = LongRowBlock<Acc>;
  launch_rows("masked_softmax", masked_softmax_long_kernel<Block>, Block{}, params, rows, stream);
}

}  // namespace mha_ext
