#include "kernels/attention_bwd_sm80.cuh"

namespace mha_ext {

template void attention_bwd_sm80<__nv_bfloat16>(const AttentionBackwardParams&, cudaStream_t);

}  // namespace mha_ext
