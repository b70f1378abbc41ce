// Loads and stores of every width, and cp.async.
#include "form.cuh"

// Copies through one load and one store, 1, 2 or 4 registers wide. `space` of the load; the store is to global memory.
#define COPY_1(name, load, store, T)                                               \
  extern "C" __global__ void name(const T* in, T* out) {                           \
    T v;                                                                           \
    asm volatile(load " %0, [%1];" : "=" REG_##T(v) : "l"(in + INDEX) : "memory"); \
    asm volatile(store " [%0], %1;" ::"l"(out + INDEX), REG_##T(v) : "memory");    \
  }
#define COPY_2(name, load, store, T)                                                                         \
  extern "C" __global__ void name(const T* in, T* out) {                                                     \
    T v, w;                                                                                                  \
    asm volatile(load " {%0, %1}, [%2];" : "=" REG_##T(v), "=" REG_##T(w) : "l"(in + INDEX * 2) : "memory"); \
    asm volatile(store " [%0], {%1, %2};" ::"l"(out + INDEX * 2), REG_##T(w), REG_##T(v) : "memory");        \
  }
#define COPY_4(name, load, store, T)                                                                          \
  extern "C" __global__ void name(const T* in, T* out) {                                                      \
    T v, w, x, y;                                                                                             \
    asm volatile(load " {%0, %1, %2, %3}, [%4];"                                                              \
                 : "=" REG_##T(v), "=" REG_##T(w), "=" REG_##T(x), "=" REG_##T(y)                             \
                 : "l"(in + INDEX * 4)                                                                        \
                 : "memory");                                                                                 \
    asm volatile(store " [%0], {%1, %2, %3, %4};" ::"l"(out + INDEX * 4), REG_##T(y), REG_##T(x), REG_##T(w), \
                 REG_##T(v)                                                                                   \
                 : "memory");                                                                                 \
  }
COPY_1(copy_b16, "ld.global.b16", "st.global.b16", b16)
COPY_1(copy_b32, "ld.global.b32", "st.global.b32", b32)
COPY_1(copy_b64, "ld.global.b64", "st.global.b64", b64)
COPY_2(copy_v2_b16, "ld.global.v2.b16", "st.global.v2.b16", b16)
COPY_2(copy_v2_b32, "ld.global.v2.b32", "st.global.v2.b32", b32)
COPY_2(copy_v2_b64, "ld.global.v2.b64", "st.global.v2.b64", b64)
COPY_4(copy_v4_b16, "ld.global.v4.b16", "st.global.v4.b16", b16)
COPY_4(copy_v4_b32, "ld.global.v4.b32", "st.global.v4.b32", b32)
COPY_4(copy_generic_v4_b32, "ld.v4.u32", "st.v4.u32", b32)
COPY_4(copy_nc_v4_b32, "ld.global.nc.v4.b32", "st.global.cs.v4.b32", b32)
COPY_4(copy_hints_v4_b32, "ld.global.nc.L1::no_allocate.L2::128B.v4.b32", "st.global.wt.v4.b32", b32)
COPY_1(copy_volatile_b32, "ld.volatile.global.b32", "st.volatile.global.b32", b32)
COPY_1(copy_relaxed_b32, "ld.relaxed.gpu.global.b32", "st.relaxed.gpu.global.b32", b32)
COPY_1(copy_acquire_b32, "ld.acquire.gpu.global.b32", "st.release.gpu.global.b32", b32)

// Bytes and halves into wider registers: sign or zero extended; only the low part is stored.
#define EXTEND(name, load, T)                                               \
  extern "C" __global__ void name(const T* in, b32* out) {                  \
    b32 v;                                                                  \
    asm volatile(load " %0, [%1];" : "=r"(v) : "l"(in + INDEX) : "memory"); \
    out[INDEX] = v;                                                         \
  }
EXTEND(load_s8, "ld.global.s8", uint8_t)
EXTEND(load_u8, "ld.global.u8", uint8_t)
EXTEND(load_s16, "ld.global.s16", b16)
EXTEND(load_u16, "ld.global.u16", b16)
extern "C" __global__ void store_u8(const b32* in, uint8_t* out) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(out + INDEX), "r"(in[INDEX]) : "memory");
}

// Reversed within the block through shared memory, and through local memory.
extern "C" __global__ void shared_v4_b32(const uint4* in, uint4* out) {
  __shared__ uint4 tile[64];
  const uint4 v = in[INDEX];
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(tile + threadIdx.x)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
  __syncthreads();
  uint4 w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(shared_address(tile + 63 - threadIdx.x))
               : "memory");
  out[INDEX] = w;
}
extern "C" __global__ void shared_v2_b64(const ulonglong2* in, ulonglong2* out) {
  __shared__ ulonglong2 tile[64];
  const ulonglong2 v = in[INDEX];
  asm volatile("st.shared.v2.b64 [%0], {%1, %2};" ::"r"(shared_address(tile + threadIdx.x)), "l"(v.x), "l"(v.y)
               : "memory");
  __syncthreads();
  ulonglong2 w;
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
               : "=l"(w.x), "=l"(w.y)
               : "r"(shared_address(tile + 63 - threadIdx.x))
               : "memory");
  out[INDEX] = w;
}
extern "C" __global__ void local_b32(const b32* in, const b32* order, b32* out) {
  b32 places[8];
  for (int i = 0; i < 8; ++i) places[order[i]] = in[INDEX * 8 + i];
  for (int i = 0; i < 8; ++i) out[INDEX * 8 + i] = places[i];
}

// cp.async: thread i copies to its own place; what lies beyond `source_bytes[i]` becomes zero. Poisoned before.
#define CP_ASYNC(name, text, size)                                                                    \
  extern "C" __global__ void name(const uint8_t* in, const b32* source_bytes, uint8_t* out) {         \
    __shared__ __align__(16) uint8_t tile[64 * size];                                                 \
    for (int i = 0; i < size; ++i) tile[threadIdx.x * size + i] = 0xAA;                               \
    asm volatile(text " [%0], [%1], " #size ", %2;" ::"r"(shared_address(tile + threadIdx.x * size)), \
                 "l"(in + INDEX * size), "r"(source_bytes[INDEX])                                     \
                 : "memory");                                                                         \
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");                      \
    __syncthreads();                                                                                  \
    for (int i = 0; i < size; ++i) out[INDEX * size + i] = tile[(63 - threadIdx.x) * size + i];       \
  }
CP_ASYNC(cp_async_ca_4, "cp.async.ca.shared.global", 4)
CP_ASYNC(cp_async_ca_8, "cp.async.ca.shared.global", 8)
CP_ASYNC(cp_async_ca_16, "cp.async.ca.shared.global", 16)
CP_ASYNC(cp_async_cg_16, "cp.async.cg.shared.global", 16)
CP_ASYNC(cp_async_cg_hint_16, "cp.async.cg.shared.global.L2::128B", 16)

// The whole 16 bytes, without the operand; or zeros where the predicate says so.
extern "C" __global__ void cp_async_plain(const uint4* in, uint4* out) {
  __shared__ uint4 tile[64];
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile + threadIdx.x)), "l"(in + INDEX)
               : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  out[INDEX] = tile[63 - threadIdx.x];
}
extern "C" __global__ void cp_async_ignore(const uint4* in, const b32* ignore, uint4* out) {
  __shared__ uint4 tile[64];
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}" ::"r"(
                   shared_address(tile + threadIdx.x)),
               "l"(in + INDEX), "r"(ignore[INDEX])
               : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  out[INDEX] = tile[63 - threadIdx.x];
}

// Four groups; after wait_group N the oldest 4 - N have landed and only those are read.
template <int kPending>
__device__ void groups(const uint4* in, uint4* out) {
  __shared__ uint4 tile[4][32];
  for (int g = 0; g < 4; ++g) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&tile[g][threadIdx.x])),
                 "l"(in + g * 32 + threadIdx.x)
                 : "memory");
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  for (int g = 0; g < 4 - kPending; ++g) out[g * 32 + threadIdx.x] = tile[g][threadIdx.x];
  asm volatile("cp.async.wait_all;" ::: "memory");
}
extern "C" __global__ void wait_group_0(const uint4* in, uint4* out) { groups<0>(in, out); }
extern "C" __global__ void wait_group_1(const uint4* in, uint4* out) { groups<1>(in, out); }
extern "C" __global__ void wait_group_3(const uint4* in, uint4* out) { groups<3>(in, out); }
