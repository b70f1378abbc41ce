// Launchers of masked_softmax, forward and backward. Acc, the type computed in, is double for fp64 tensors, else float.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace mha_ext {

template <typename Acc>
void launch_masked_softmax(const MaskedSoftmaxParams& params, cudaStream_t stream);

template <typename Acc>
void launch_masked_softmax_backward(const MaskedSoftmaxBackwardParams& params, cudaStream_t stream);

}  // namespace mha_ext
