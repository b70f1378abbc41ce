// Exchange between the lanes of one warp. Lanes outside of the mask do not take part and write nothing.
#include "form.cuh"

__device__ bool takes_part(b32 mask) { return mask >> (threadIdx.x % 32) & 1; }

// One operand and a control word a lane; the value received, and whether the source lay inside the segment.
#define SHUFFLE(mode)                                                                                                 \
  extern "C" __global__ void shfl_##mode(const b32* a, const b32* b, const b32* c, b32 mask, b32* out, b32* inside) { \
    if (!takes_part(mask)) return;                                                                                    \
    b32 d, p;                                                                                                         \
    asm volatile("{\n.reg .pred p;\nshfl.sync." #mode ".b32 %0|p, %2, %3, %4, %5;\nselp.b32 %1, 1, 0, p;\n}"          \
                 : "=r"(d), "=r"(p)                                                                                   \
                 : "r"(a[INDEX]), "r"(b[INDEX]), "r"(c[INDEX]), "r"(mask));                                           \
    out[INDEX] = d;                                                                                                   \
    inside[INDEX] = p;                                                                                                \
  }
SHUFFLE(up)
SHUFFLE(down)
SHUFFLE(bfly)
SHUFFLE(idx)

#define VOTE(mode)                                                              \
  extern "C" __global__ void vote_##mode(const b32* a, b32 mask, b32* out) {    \
    if (!takes_part(mask)) return;                                              \
    b32 d;                                                                      \
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nvote.sync." #mode \
                 ".pred q, p, %2;\nselp.b32 %0, 1, 0, q;\n}"                    \
                 : "=r"(d)                                                      \
                 : "r"(a[INDEX]), "r"(mask));                                   \
    out[INDEX] = d;                                                             \
  }
VOTE(all)
VOTE(any)
VOTE(uni)
extern "C" __global__ void vote_ballot(const b32* a, b32 mask, b32* out) {
  if (!takes_part(mask)) return;
  b32 d;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nvote.sync.ballot.b32 %0, p, %2;\n}"
               : "=r"(d)
               : "r"(a[INDEX]), "r"(mask));
  out[INDEX] = d;
}

#define MATCH(type)                                                                                   \
  extern "C" __global__ void match_any_##type(const type* a, b32 mask, b32* out) {                    \
    if (!takes_part(mask)) return;                                                                    \
    b32 d;                                                                                            \
    asm volatile("match.any.sync." #type " %0, %1, %2;" : "=r"(d) : REG_##type(a[INDEX]), "r"(mask)); \
    out[INDEX] = d;                                                                                   \
  }                                                                                                   \
  extern "C" __global__ void match_all_##type(const type* a, b32 mask, b32* out, b32* all) {          \
    if (!takes_part(mask)) return;                                                                    \
    b32 d, p;                                                                                         \
    asm volatile("{\n.reg .pred p;\nmatch.all.sync." #type " %0|p, %2, %3;\nselp.b32 %1, 1, 0, p;\n}" \
                 : "=r"(d), "=r"(p)                                                                   \
                 : REG_##type(a[INDEX]), "r"(mask));                                                  \
    out[INDEX] = d;                                                                                   \
    all[INDEX] = p;                                                                                   \
  }
MATCH(b32)
MATCH(b64)

#define REDUX(name, text)                                                   \
  extern "C" __global__ void name(const b32* a, b32 mask, b32* out) {       \
    if (!takes_part(mask)) return;                                          \
    b32 d;                                                                  \
    asm volatile(text " %0, %1, %2;" : "=r"(d) : "r"(a[INDEX]), "r"(mask)); \
    out[INDEX] = d;                                                         \
  }
REDUX(redux_sync_add_s32, "redux.sync.add.s32")
REDUX(redux_sync_add_u32, "redux.sync.add.u32")
REDUX(redux_sync_min_s32, "redux.sync.min.s32")
REDUX(redux_sync_min_u32, "redux.sync.min.u32")
REDUX(redux_sync_max_s32, "redux.sync.max.s32")
REDUX(redux_sync_max_u32, "redux.sync.max.u32")
REDUX(redux_sync_and_b32, "redux.sync.and.b32")
REDUX(redux_sync_or_b32, "redux.sync.or.b32")
REDUX(redux_sync_xor_b32, "redux.sync.xor.b32")

extern "C" __global__ void activemask(b32 mask, b32* out) {
  if (!takes_part(mask)) return;
  b32 d;
  asm volatile("activemask.b32 %0;" : "=r"(d));
  out[INDEX] = d;
}

extern "C" __global__ void special_registers(b32* out) {
  b32 d[9];
  asm volatile(
      "mov.u32 %0, %%laneid;\nmov.u32 %1, %%lanemask_eq;\nmov.u32 %2, %%lanemask_lt;\nmov.u32 %3, %%lanemask_le;\n"
      "mov.u32 %4, %%lanemask_gt;\nmov.u32 %5, %%lanemask_ge;\nmov.u32 %6, %%tid.y;\nmov.u32 %7, %%ctaid.x;\n"
      "mov.u32 %8, %%nctaid.x;"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]), "=r"(d[8]));
  const int thread = (blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  for (int i = 0; i < 9; ++i) out[thread * 9 + i] = d[i];
}
