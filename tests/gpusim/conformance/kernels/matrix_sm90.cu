// stmatrix: the registers [lane][register] become 8 x 8 matrices in shared memory.
#include "form.cuh"

#define LANE (threadIdx.x)
#define STMATRIX_BODY(count, text, ...)                                                \
  __shared__ uint4 rows[32];                                                           \
  rows[LANE] = make_uint4(0, 0, 0, 0);                                                 \
  __syncwarp();                                                                        \
  in += LANE * count;                                                                  \
  asm volatile(text::"r"(shared_address(rows + order[LANE])), __VA_ARGS__ : "memory"); \
  __syncwarp();                                                                        \
  out[LANE] = rows[LANE];
#define STMATRIX(suffix, trans)                                                                                   \
  extern "C" __global__ void stmatrix_x1##suffix(const b32* in, const b32* order, uint4* out) {                   \
    STMATRIX_BODY(1, "stmatrix.sync.aligned.m8n8.x1" trans ".shared.b16 [%0], {%1};", "r"(in[0]))                 \
  }                                                                                                               \
  extern "C" __global__ void stmatrix_x2##suffix(const b32* in, const b32* order, uint4* out) {                   \
    STMATRIX_BODY(2, "stmatrix.sync.aligned.m8n8.x2" trans ".shared.b16 [%0], {%1, %2};", "r"(in[0]), "r"(in[1])) \
  }                                                                                                               \
  extern "C" __global__ void stmatrix_x4##suffix(const b32* in, const b32* order, uint4* out) {                   \
    STMATRIX_BODY(4, "stmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 [%0], {%1, %2, %3, %4};", "r"(in[0]),     \
                  "r"(in[1]), "r"(in[2]), "r"(in[3]))                                                             \
  }
STMATRIX(, "")
STMATRIX(_trans, ".trans")
