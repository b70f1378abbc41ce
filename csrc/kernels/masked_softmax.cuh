// weights = softmax over the visible keys of each row of scores: one read, one write.
//
// A row of up to 8192 keys stays in the registers of a warp or of a block. A longer one is read twice: once for its
// largest score and its sum, once for its weights.
#pragma once

#include "attention/online_softmax.h"
#include "kernels/masked_softmax.h"
#include "kernels/row_tile.cuh"
#include "launch.h"

namespace mha_ext {

struct MaskedSoftmaxLaunch {
  int64_t first_row;              // of the first block
  bool packed_rows, packed_mask;  // which tensors can be read and written in packs
};

// scores = scores under the mask
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void apply_mask(RowTile<Acc, kVecs>& scores, const ScoreRuleParams& params,
                                           const RowRule<Acc>& rule, const RowColumns<kVecs, kThreads>& columns,
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

// The scores of one tile as attention/mask.h defines them, -inf where a key is not visible. Returns the largest that this
// thread holds, NaN if one is NaN.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc load_scores(RowTile<Acc, kVecs>& scores, const MaskedSoftmaxParams& params,
                                           const MaskedSoftmaxLaunch& launch, const RowIndex& index,
                                           const RowRule<Acc>& rule, const RowColumns<kVecs, kThreads>& columns) {
  load_tile<Acc, kVecs, kThreads>(scores, params.scores, params.scores_dtype, index.offset(params.scores_strides),
                                  columns, rule.begin, rule.end);
  if (rule.softcap != Acc(0)) {
    for_each_element<kVecs>([&](int vec, int element) { scores[vec][element] = rule.capped(scores[vec][element]); });
  }
  if (params.rule.attn_mask) apply_mask<Acc, kVecs, kThreads>(scores, params.rule, rule, columns, launch.packed_mask);
  if (params.rule.alibi_slopes) {
    for_each_element<kVecs>([&](int vec, int element) {
      scores[vec][element] -= rule.slope * rule.distance(columns.at(vec, element));
    });
  }

  Acc largest = -kInfinity<Acc>;
  bool has_nan = false;
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    const bool whole = columns.within(vec, rule.begin, rule.end);
    const bool none = !columns.overlaps(vec, rule.begin, rule.end);
#pragma unroll
    for (int element = 0; element < kPack; ++element) {
      if (none || (!whole && !rule.in_bounds(columns.at(vec, element)))) scores[vec][element] = -kInfinity<Acc>;
    }
    if (none) continue;
#pragma unroll
    for (int element = 0; element < kPack; ++element) {
      largest = fmax(largest, scores[vec][element]);  // passes over NaN
      has_nan |= scores[vec][element] != scores[vec][element];
    }
  }
  return has_nan ? kNaN<Acc> : largest;
}

// tile = exp(tile - shift). Returns the sum of what this thread holds.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc exponentiate(RowTile<Acc, kVecs>& tile, Acc shift, const RowRule<Acc>& rule,
                                            const RowColumns<kVecs, kThreads>& columns) {
  if (shift != shift) {  // a NaN row, but for the keys that are not visible
    for_each_element<kVecs>([&](int vec, int element) {
      tile[vec][element] = tile[vec][element] == -kInfinity<Acc> ? Acc(0) : shift;
    });
    return shift;
  }
  Acc sum = Acc(0);
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (columns.overlaps(vec, rule.begin, rule.end)) {
#pragma unroll
      for (int element = 0; element < kPack; ++element) {
        tile[vec][element] = exp(tile[vec][element] - shift);
        sum += tile[vec][element];
      }
    } else {
#pragma unroll
      for (int element = 0; element < kPack; ++element) tile[vec][element] = Acc(0);
    }
  }
  return sum;
}

// Writes weights and dropped, from exp(score - shift). Returns this thread's share of the entropy if that is asked for.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ Acc store_weights(RowTile<Acc, kVecs>& tile, const MaskedSoftmaxParams& params,
                                             const RowIndex& index, Acc inverse_sum,
                                             const RowColumns<kVecs, kThreads>& columns) {
  for_each_element<kVecs>([&](int vec, int element) { tile[vec][element] *= inverse_sum; });
  const int64_t offset = index.offset(params.weights_strides);
  const int end = static_cast<int>(params.seqlen_kv);
  store_tile<Acc, kVecs, kThreads>(tile, params.weights, params.weights_dtype, offset, columns, end);

  Acc entropy = Acc(0);
  if (params.entropy) {
    for_each_element<kVecs>([&](int vec, int element) {
      const Acc weight = tile[vec][element];
      if (weight != Acc(0)) entropy -= weight * log(weight);
    });
  }
  if (params.dropped) {
    drop_tile<Acc, kVecs, kThreads>(tile, params.dropout, index.batch_head, index.query, columns, end);
    store_tile<Acc, kVecs, kThreads>(tile, params.dropped, params.weights_dtype, offset, columns, end);
  }
  return entropy;
}

// A row in the registers of kWarps warps. A block has several rows of one warp each, or one row.
template <typename Acc, int kVecs, int kWarps, int kRowsPerBlock>
__global__ __launch_bounds__(kWarpSize* kWarps* kRowsPerBlock, min_blocks<Acc>(kVecs, kWarps* kRowsPerBlock)) void masked_softmax_kernel(
    const __grid_constant__ MaskedSoftmaxParams params, const __grid_constant__ MaskedSoftmaxLaunch launch) {
  static_assert(kWarps == 1 || kRowsPerBlock == 1, "a row shared by several warps has the block to itself");
  constexpr int kThreads = kWarpSize * kWarps;
  __shared__ Acc scratch[kWarps];

  const int64_t row = launch.first_row + int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kThreads;
  if (row >= params.batch * params.heads * params.seqlen_q) return;
  const int thread = threadIdx.x % kThreads;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  const RowColumns<kVecs, kThreads> columns(launch.packed_rows, thread);

  Acc tile[kVecs][kPack];
  const Acc largest = load_scores<Acc, kVecs, kThreads>(tile, params, launch, index, rule, columns);
  const Acc max_score = group_reduce<kWarps>(largest, scratch, max_or_nan<Acc>);

  const Acc sink = row_sink<Acc>(params.rule, index.head);
  const Acc shift = softmax_shift(max_or_nan(max_score, sink));
  const Acc sum = group_sum<kWarps>(exponentiate<Acc, kVecs, kThreads>(tile, shift, rule, columns), scratch);
  const SoftmaxRow<Acc> result(shift, sum + exp(sink - shift));

  Acc entropy = store_weights<Acc, kVecs, kThreads>(tile, params, index, result.inverse_sum, columns);
  if (thread == 0) static_cast<Acc*>(params.lse)[row] = result.lse;
  if (params.max_score && thread == 0) static_cast<Acc*>(params.max_score)[row] = max_score;
  if (params.entropy) {
    entropy = group_sum<kWarps>(entropy, scratch);
    if (thread == 0) static_cast<Acc*>(params.entropy)[row] = entropy;
  }
}

// A row of any length, by a block.
template <typename Acc, int kVecs, int kWarps>
__global__ __launch_bounds__(kWarpSize* kWarps, min_blocks<Acc>(kVecs, kWarps)) void masked_softmax_long_kernel(
    const __grid_constant__ MaskedSoftmaxParams params, const __grid_constant__ MaskedSoftmaxLaunch launch) {
  constexpr int kThreads = kWarpSize * kWarps;
  using Columns = RowColumns<kVecs, kThreads>;
  __shared__ Acc scratch[kWarps];

  const int64_t row = launch.first_row + blockIdx.x;
  const RowIndex index(row, params.heads, params.seqlen_q);
  const RowRule<Acc> rule = row_rule<Acc>(params.rule, index.batch, index.head, index.query, params.seqlen_kv);
  Acc tile[kVecs][kPack];

  // first read: the largest score and the sum
  SoftmaxState<Acc> state;
  for (int begin = rule.begin / Columns::kTile * Columns::kTile; begin < rule.end; begin += Columns::kTile) {
    const Columns columns(launch.packed_rows, threadIdx.x, begin);
    const Acc largest = load_scores<Acc, kVecs, kThreads>(tile, params, launch, index, rule, columns);
    state.rescale(max_or_nan(state.max, largest));
    state.sum += exponentiate<Acc, kVecs, kThreads>(tile, softmax_shift(state.max), rule, columns);
  }
  const Acc max_score = group_reduce<kWarps>(state.max, scratch, max_or_nan<Acc>);
  const Acc sink = row_sink<Acc>(params.rule, index.head);
  const Acc shift = softmax_shift(max_or_nan(max_score, sink));
  state.rescale(max_or_nan(max_score, sink));
  const Acc sum = group_sum<kWarps>(state.sum, scratch);
  const SoftmaxRow<Acc> result(shift, sum + exp(sink - shift));

  // second read: the weights
  Acc entropy = Acc(0);
  for (int64_t begin = 0; begin < params.seqlen_kv; begin += Columns::kTile) {
    const Columns columns(launch.packed_rows, threadIdx.x, static_cast<int>(begin));
    load_scores<Acc, kVecs, kThreads>(tile, params, launch, index, rule, columns);
    exponentiate<Acc, kVecs, kThreads>(tile, shift, rule, columns);
    entropy += store_weights<Acc, kVecs, kThreads>(tile, params, index, result.inverse_sum, columns);
  }
  if (params.entropy) entropy = group_sum<kWarps>(entropy, scratch);
  if (threadIdx.x == 0) {
    static_cast<Acc*>(params.lse)[row] = result.lse;
    if (params.max_score) static_cast<Acc*>(params.max_score)[row] = max_score;
    if (params.entropy) static_cast<Acc*>(params.entropy)[row] = entropy;
  }
}

template <typename Acc>
void launch_masked_softmax(const MaskedSoftmaxParams& params, cudaStream_t stream) {
  const auto aligned = [](const void* base, DType dtype, const Strides3& strides) {
    return packs_align(base, dtype, kPack, strides.batch, strides.head, strides.row);
  };
  const ScoreRuleParams& rule = params.rule;
  const Strides4& mask = rule.mask_strides;
  MaskedSoftmaxLaunch rows;
  rows.packed_rows = params.seqlen_kv % kPack == 0 &&
                     aligned(params.scores, params.scores_dtype, params.scores_strides) &&
                     aligned(params.weights, params.weights_dtype, params.weights_strides) &&
                     (!params.dropped || aligned(params.dropped, params.weights_dtype, params.weights_strides));
  rows.packed_mask = rows.packed_rows && rule.attn_mask && mask.col == 1 &&
                     aligned(rule.attn_mask, rule.mask_dtype, {mask.batch, mask.head, mask.row});

  const auto launch_rows = [&](auto kernel, int warps, int rows_per_block) {
    const int64_t num_rows = params.batch * params.heads * params.seqlen_q;
    for (rows.first_row = 0; rows.first_row < num_rows; rows.first_row += kMaxGrid * rows_per_block) {
      const int64_t blocks = (num_rows - rows.first_row + rows_per_block - 1) / rows_per_block;
      launch(kernel, {"masked_softmax", blocks, kWarpSize * warps * rows_per_block, 0, stream}, params, rows);
    }
  };
  if (params.seqlen_kv <= 256) return launch_rows(masked_softmax_kernel<Acc, 2, 1, 4>, 1, 4);
  if (params.seqlen_kv <= 1024) return launch_rows(masked_softmax_kernel<Acc, 8, 1, 4>, 1, 4);
  if (params.seqlen_kv <= 4096) return launch_rows(masked_softmax_kernel<Acc, 8, 4, 1>, 4, 1);
  if (params.seqlen_kv <= 8192) return launch_rows(masked_softmax_kernel<Acc, 8, 8, 1>, 8, 1);
  launch_rows(masked_softmax_long_kernel<Acc, 2, 16>, 16, 1);
}

}  // namespace mha_ext
