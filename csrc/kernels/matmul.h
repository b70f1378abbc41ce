// c[b, h] = alpha * op(a[b, h']) @ op(b[b, h'']), on the tensor cores or the FMA units.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace mha_ext {

// Picks the kernel. Every size is below 2^31; an empty c launches nothing; k = 0 writes zeros.
void matmul(const MatmulParams& params, cudaStream_t stream);

template <typename Element>  // __half, __nv_bfloat16; float, rounded to TF32
void matmul_mma(const MatmulParams& params, cudaStream_t stream);

template <typename Element>  // float, double
void matmul_simt(const MatmulParams& params, cudaStream_t stream);

}  // namespace mha_ext
