// ldmatrix, and mma.sync of every shape and type that sm_80 has for floats. Registers come from global memory and go
// back there: [lane][register].
#include "form.cuh"

#define LANE (threadIdx.x)

// 32 rows of 16 bytes; lane i gives the address of row order[i].
#define LDMATRIX_BODY(count, text, ...)                                                  \
  __shared__ uint4 rows[32];                                                             \
  rows[LANE] = in[LANE];                                                                 \
  __syncwarp();                                                                          \
  b32 d[count];                                                                          \
  asm volatile(text : __VA_ARGS__ : "r"(shared_address(rows + order[LANE])) : "memory"); \
  for (int i = 0; i < count; ++i) out[LANE * count + i] = d[i];
#define LDMATRIX(suffix, trans)                                                                                   \
  extern "C" __global__ void ldmatrix_x1##suffix(const uint4* in, const b32* order, b32* out) {                   \
    LDMATRIX_BODY(1, "ldmatrix.sync.aligned.m8n8.x1" trans ".shared.b16 {%0}, [%1];", "=r"(d[0]))                 \
  }                                                                                                               \
  extern "C" __global__ void ldmatrix_x2##suffix(const uint4* in, const b32* order, b32* out) {                   \
    LDMATRIX_BODY(2, "ldmatrix.sync.aligned.m8n8.x2" trans ".shared.b16 {%0, %1}, [%2];", "=r"(d[0]), "=r"(d[1])) \
  }                                                                                                               \
  extern "C" __global__ void ldmatrix_x4##suffix(const uint4* in, const b32* order, b32* out) {                   \
    LDMATRIX_BODY(4, "ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];", "=r"(d[0]),     \
                  "=r"(d[1]), "=r"(d[2]), "=r"(d[3]))                                                             \
  }
LDMATRIX(, "")
LDMATRIX(_trans, ".trans")

extern "C" __global__ void movmatrix_trans(const b32* in, b32* out) {
  b32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(in[LANE]));
  out[LANE] = d;
}

// The numbers in the names: 32-bit registers of A, B, and C or D.
#define MMA_4_2_4(name, text)                                                                                \
  extern "C" __global__ void name(const b32* a, const b32* b, b32* c) {                                      \
    a += LANE * 4, b += LANE * 2, c += LANE * 4;                                                             \
    asm volatile("mma.sync.aligned." text " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                        \
  }
#define MMA_4_2_2(name, text)                                                                \
  extern "C" __global__ void name(const b32* a, const b32* b, b32* c) {                      \
    a += LANE * 4, b += LANE * 2, c += LANE * 2;                                             \
    asm volatile("mma.sync.aligned." text " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};" \
                 : "+r"(c[0]), "+r"(c[1])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));        \
  }
#define MMA_2_1_4(name, text)                                                                    \
  extern "C" __global__ void name(const b32* a, const b32* b, b32* c) {                          \
    a += LANE * 2, b += LANE, c += LANE * 4;                                                     \
    asm volatile("mma.sync.aligned." text " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));                                             \
  }
#define MMA_2_1_2(name, text)                                                    \
  extern "C" __global__ void name(const b32* a, const b32* b, b32* c) {          \
    a += LANE * 2, b += LANE, c += LANE * 2;                                     \
    asm volatile("mma.sync.aligned." text " {%0, %1}, {%2, %3}, {%4}, {%0, %1};" \
                 : "+r"(c[0]), "+r"(c[1])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));                             \
  }
MMA_4_2_4(mma_m16n8k16_f32_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_4_2_4(mma_m16n8k16_f32_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_4_2_2(mma_m16n8k16_f16_f16, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_2_1_4(mma_m16n8k8_f32_f16, "m16n8k8.row.col.f32.f16.f16.f32")
MMA_2_1_4(mma_m16n8k8_f32_bf16, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_2_1_2(mma_m16n8k8_f16_f16, "m16n8k8.row.col.f16.f16.f16.f16")
MMA_4_2_4(mma_m16n8k8_f32_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_2_1_4(mma_m16n8k4_f32_tf32, "m16n8k4.row.col.f32.tf32.tf32.f32")

extern "C" __global__ void mma_m8n8k4_f64(const double* a, const double* b, double* c) {
  c += LANE * 2;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c[0]), "+d"(c[1])
               : "d"(a[LANE]), "d"(b[LANE]));
}
