#include "kernels/matmul_mma.cuh"

namespace mha_ext {

template void matmul_mma<float>(const MatmulParams&, cudaStream_t);

}  // namespace mha_ext
