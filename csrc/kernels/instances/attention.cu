#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "kernels/attention.h"
#include "kernels/attention_bwd_bias_plan.h"

namespace mha_ext {

namespace {

[[noreturn]] void refuse(DType dtype) {
  throw std::invalid_argument("fused attention: expected fp16, bf16 or fp32, got DType " +
                              std::to_string(static_cast<int>(dtype)));
}

// The gradient of attn_mask has its part of the workspace behind that of the other gradients.
int64_t bias_workspace_begin(const AttentionBackwardParams& p) {
  const int64_t bytes = p.forward.dtype == DType::kFloat32 ? 0 : attention_bwd_sm80_workspace(p).total;
  return (bytes + 15) / 16 * 16;
}

template <typename Element>
void attention_bwd_bias(AttentionBackwardParams p, cudaStream_t stream) {
  if (!p.grad_bias) return;
  p.workspace = static_cast<char*>(p.workspace) + bias_workspace_begin(p);
  if constexpr (sizeof(Element) == 4) {
    attention_bwd_bias_tf32(p, stream);
  } else {
    attention_bwd_bias_sm80<Element>(p, stream);
  }
}

template <typename Element>
void attention_bwd(const AttentionBackwardParams& p, cudaStream_t stream) {
  attention_bwd_delta(p, stream);
  if constexpr (sizeof(Element) == 4) {
    attention_bwd_tf32(p, stream);
  } else {
    attention_bwd_sm80<Element>(p, stream);
  }
  attention_bwd_bias<Element>(p, stream);
}

}  // namespace

void attention_forward(const AttentionParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat16: return attention_fwd_sm80<__half>(p, stream);
    case DType::kBFloat16: return attention_fwd_sm80<__nv_bfloat16>(p, stream);
    case DType::kFloat32: return attention_fwd_tf32(p, stream);
    default: refuse(p.dtype);
  }
}

void attention_backward(const AttentionBackwardParams& p, cudaStream_t stream) {
  switch (p.forward.dtype) {
    case DType::kFloat16: return attention_bwd<__half>(p, stream);
    case DType::kBFloat16: return attention_bwd<__nv_bfloat16>(p, stream);
    case DType::kFloat32: return attention_bwd<float>(p, stream);
    default: refuse(p.forward.dtype);
  }
}

WorkspaceBytes attention_backward_workspace(const AttentionBackwardParams& p) {
  WorkspaceBytes bytes = {0, 0};
  if (p.forward.dtype != DType::kFloat32) bytes = attention_bwd_sm80_workspace(p);
  if (p.grad_bias) bytes.total = bias_workspace_begin(p) + BiasGradPlan(p).workspace_bytes();
  return bytes;
}

int64_t attention_backward_slope_partials(const AttentionParams& p) {
  return p.dtype == DType::kFloat32 ? attention_bwd_tf32_slope_partials(p) : attention_bwd_sm80_slope_partials(p);
}

}  // namespace mha_ext
