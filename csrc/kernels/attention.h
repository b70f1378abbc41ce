// Launchers of fused attention: forward, backward, and the pass over a mask that precedes both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace mha_ext {

// Head dimensions and value head dimensions end here.
constexpr int kMaxFusedHeadDim = 256;

void mask_blocks(const MaskBlocksParams& params, cudaStream_t stream);

// Pick the kernel by dtype and head dimension. No queries: nothing is launched. No keys: zeros are written.
void attention_forward(const AttentionParams& params, cudaStream_t stream);
void attention_backward(const AttentionBackwardParams& params, cudaStream_t stream);

// What attention_backward wants in AttentionBackwardParams::workspace, and how many bytes of it zeroed.
struct WorkspaceBytes {
  int64_t total, zeroed;
};
WorkspaceBytes attention_backward_workspace(const AttentionBackwardParams& params);

// How many parts of the gradient of a head's slope there are: slope_partials.
int64_t attention_backward_slope_partials(const AttentionParams& params);

// 16-bit inputs, by mma.sync (sm_80).
template <typename Element>
void attention_fwd_sm80(const AttentionParams& params, cudaStream_t stream);
template <typename Element>
void attention_bwd_sm80(const AttentionBackwardParams& params, cudaStream_t stream);
WorkspaceBytes attention_bwd_sm80_workspace(const AttentionBackwardParams& params);
int64_t attention_bwd_sm80_slope_partials(const AttentionParams& params);

// fp32 inputs, by mma.sync on TF32 parts (sm_80).
void attention_fwd_tf32(const AttentionParams& params, cudaStream_t stream);
void attention_bwd_tf32(const AttentionBackwardParams& params, cudaStream_t stream);
int64_t attention_bwd_tf32_slope_partials(const AttentionParams& params);

// delta and grad_sink_rows: one pass over output and grad_output.
void attention_bwd_delta(const AttentionBackwardParams& params, cudaStream_t stream);

// grad_bias: a block owns a tile of it and adds up what was broadcast, in order.
template <typename Element>  // __half, __nv_bfloat16
void attention_bwd_bias_sm80(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_bwd_bias_tf32(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace mha_ext
