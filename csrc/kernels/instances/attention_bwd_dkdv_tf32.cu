#include "kernels/attention_bwd_dkdv_tf32.cuh"
#include "kernels/attention_bwd_tf32.h"

namespace mha_ext {

void attention_bwd_dkdv_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  dispatch_tf32(params.forward, [&](auto products, auto head_dim) {
    launch_attention_bwd_dkdv_tf32<products, head_dim>(params, stream);
  });
}

}  // namespace mha_ext
