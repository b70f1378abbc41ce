#include "kernels/attention_bwd_dq_tf32.cuh"
#include "kernels/attention_bwd_tf32.h"

namespace mha_ext {

void attention_bwd_dq_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  dispatch_tf32(params.forward, [&](auto products, auto head_dim) {
    launch_attention_bwd_dq_tf32<products, head_dim>(params, stream);
  });
}

void attention_bwd_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  attention_bwd_dkdv_tf32(params, stream);
  attention_bwd_dq_tf32(params, stream);
}

int64_t attention_bwd_tf32_slope_partials(const AttentionParams& p) {
  int64_t parts = 0;
  dispatch_tf32(p,
                [&](auto, auto head_dim) { parts = ceil_div(p.seqlen_q, attention_dq_tf32_tile(head_dim).block_m); });
  return p.cu_seqlens_q ? std::max<int64_t>(parts, 1) : parts;  // a packed sequence without queries has a part, too
}

}  // namespace mha_ext
