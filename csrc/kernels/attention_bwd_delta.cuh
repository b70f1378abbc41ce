// What the backward of a row needs to know of the whole row:
//
//   rowsum = sum over d of grad_output * output, which is the sum over j of P dP
//   delta  = rowsum - grad_lse                    grad_sink_row = exp(sink - lse) (grad_lse - rowsum)
//
// Memory-bound: eight lanes share a row, so that each access of a row of 16-bit elements is one line of 128 bytes.
#pragma once

#include "attention/mask.h"
#include "device/types.h"
#include "device/warp.h"
#include "dispatch.h"
#include "kernels/attention.h"
#include "launch.h"

namespace mha_ext {

constexpr int kDeltaBlock = 256;
constexpr int kDeltaLanes = 8;  // to a row

// The rows are those of lse: of one sequence of all tokens where the batch is packed.
template <typename T, int kPack>
__global__ __launch_bounds__(kDeltaBlock) void attention_bwd_delta_kernel(
    const __grid_constant__ AttentionBackwardParams p, const __grid_constant__ int64_t rows) {
  const AttentionParams& f = p.forward;
  const int64_t thread = int64_t{blockIdx.x} * kDeltaBlock + threadIdx.x;
  const int64_t row = thread / kDeltaLanes;
  const int lane = static_cast<int>(thread % kDeltaLanes);
  const int64_t slice = row / f.seqlen_q, i = row - slice * f.seqlen_q;
  const int64_t b = slice / f.num_heads_q, h = slice - b * f.num_heads_q;

  float rowsum = 0.0f;
  if (row < rows) {
    const auto at = [&](const void* base, const Strides3& strides) {
      return static_cast<const T*>(base) + b * strides.batch + h * strides.head + i * strides.row;
    };
    const T *output = at(f.output, f.output_strides), *grad = at(p.grad_output, p.grad_output_strides);
#pragma unroll 2
    for (int col = lane * kPack; col < f.head_dim_v; col += kDeltaLanes * kPack) {
      const Pack<T, kPack> outputs = load_pack<T, kPack>(output + col), grads = load_pack<T, kPack>(grad + col);
#pragma unroll
      for (int k = 0; k < kPack; ++k) rowsum += convert<float>(outputs.at[k]) * convert<float>(grads.at[k]);
    }
  }
#pragma unroll
  for (int distance = kDeltaLanes / 2; distance > 0; distance /= 2) {
    rowsum += __shfl_xor_sync(kAllLanes, rowsum, distance);
  }
  if (row >= rows || lane != 0) return;

  const int64_t at = b * f.row_batch_stride + h * f.row_head_stride + i;
  const float delta = rowsum - (p.grad_lse ? p.grad_lse[at] : 0.0f);
  p.delta[at] = delta;
  if (p.grad_sink_rows) {
    const float lse = f.lse[at];
    const float weight = lse == -kInfinity<float> ? 0.0f : expf(row_sink<float>(f.rule, h) - lse);
    p.grad_sink_rows[at] = weight == 0.0f ? 0.0f : -weight * delta;
  }
}

template <typename T, int kPack>
void launch_attention_bwd_delta(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const int64_t rows = (f.cu_seqlens_q ? 1 : f.batch) * f.num_heads_q * f.seqlen_q;
  const int64_t blocks = (rows * kDeltaLanes + kDeltaBlock - 1) / kDeltaBlock;
  launch(attention_bwd_delta_kernel<T, kPack>, {"attention_bwd_delta", blocks, kDeltaBlock, 0, stream}, p, rows);
}

void attention_bwd_delta(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  dispatch_dtype(f.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) <= 4) {
      constexpr int kPack = 16 / sizeof(T);
      const auto aligned = [&](const void* base, const Strides3& strides) {
        return packs_align(base, f.dtype, kPack, strides.batch, strides.head, strides.row);
      };
      const bool packs = f.head_dim_v % kPack == 0 && aligned(f.output, f.output_strides) &&
                         aligned(p.grad_output, p.grad_output_strides);
      packs ? launch_attention_bwd_delta<T, kPack>(p, stream) : launch_attention_bwd_delta<T, 1>(p, stream);
    }
  });
}

}  // namespace mha_ext
