// The two kernels of the fp32 backward.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace mha_ext {

void attention_bwd_dkdv_tf32(const AttentionBackwardParams& params, cudaStream_t stream);
void attention_bwd_dq_tf32(const AttentionBackwardParams& params, cudaStream_t stream);

}  // namespace mha_ext
