#include "kernels/matmul_mma.cuh"

namespace mha_ext {

template void matmul_mma<__nv_bfloat16>(const MatmulParams&, cudaStream_t);

}  // namespace mha_ext
