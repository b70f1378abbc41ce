#include "kernels/attention_bwd_bias.cuh"

namespace mha_ext {

void attention_bwd_bias_tf32(const AttentionBackwardParams& p, cudaStream_t stream) {
  p.forward.allow_tf32 ? launch_attention_bwd_bias<float, 1>(p, stream)
                       : launch_attention_bwd_bias<float, 3>(p, stream);
}

}  // namespace mha_ext
