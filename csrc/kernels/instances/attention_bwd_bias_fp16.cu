#include "kernels/attention_bwd_bias.cuh"

template void mha_ext::attention_bwd_bias_sm80<__half>(const AttentionBackwardParams&, cudaStream_t);
