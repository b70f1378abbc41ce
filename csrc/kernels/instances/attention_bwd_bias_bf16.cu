#include "kernels/attention_bwd_bias.cuh"

template void mha_ext::attention_bwd_bias_sm80<__nv_bfloat16>(const AttentionBackwardParams&, cudaStream_t);
