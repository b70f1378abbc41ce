#include "kernels/matmul_simt.cuh"

namespace mha_ext {

template void matmul_simt<double>(const MatmulParams&, cudaStream_t);

}  // namespace mha_ext
