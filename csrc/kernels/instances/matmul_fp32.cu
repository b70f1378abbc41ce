#include "kernels/matmul_simt.cuh"

namespace mha_ext {

template void matmul_simt<float>(const MatmulParams&, cudaStream_t);

}  // namespace mha_ext
