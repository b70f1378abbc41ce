#include "kernels/attention_fwd_sm80.cuh"

namespace mha_ext {

template void attention_fwd_sm80<__nv_bfloat16>(const AttentionParams&, cudaStream_t);

}  // namespace mha_ext
