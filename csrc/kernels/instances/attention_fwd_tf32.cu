#include "kernels/attention_fwd_tf32.cuh"

namespace mha_ext {

void attention_fwd_tf32(const AttentionParams& p, cudaStream_t stream) {
  dispatch_tf32(p, [&](auto products, auto head_dim) { launch_attention_fwd_tf32<products, head_dim>(p, stream); });
}

}  // namespace mha_ext
