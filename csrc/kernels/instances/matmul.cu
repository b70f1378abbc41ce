#include "dispatch.h"
#include "kernels/matmul.h"

namespace mha_ext {

void matmul(const MatmulParams& p, cudaStream_t stream) {
  if (p.batch <= 0 || p.heads_c <= 0 || p.m <= 0 || p.n <= 0) return;
  dispatch_dtype(p.in_dtype, [&](auto type) {
    using Element = typename decltype(type)::type;
    if constexpr (sizeof(Element) == 2) {
      matmul_mma<Element>(p, stream);
    } else if constexpr (sizeof(Element) == 4) {
      p.allow_tf32 ? matmul_mma<Element>(p, stream) : matmul_simt<Element>(p, stream);
    } else {
      matmul_simt<Element>(p, stream);
    }
  });
}

}  // namespace mha_ext
