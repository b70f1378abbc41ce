#include "kernels/masked_softmax.cuh"

template void mha_ext::launch_masked_softmax<float>(const MaskedSoftmaxParams&, cudaStream_t);
