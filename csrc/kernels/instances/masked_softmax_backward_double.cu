#include "kernels/masked_softmax_backward.cuh"

template void mha_ext::launch_masked_softmax_backward<double>(const MaskedSoftmaxBackwardParams&, cudaStream_t);
