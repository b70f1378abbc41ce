// Atomic operations, as sm_80 has them: on global and shared memory, returning the old value (atom) or nothing (red).
#include "form.cuh"

// Thread i works on place i, so that the old value is known: old[i] = memory[i], memory[i] = op(memory[i], a[i]).
// ON_ONE_PLACE: all work on the first.
#define ATOMIC(name, op, T)                                                      \
  extern "C" __global__ void atom_global_##name(T* memory, const T* a, T* old) { \
    T d;                                                                         \
    asm volatile("atom.global." op " %0, [%1], %2;"                              \
                 : "=" REG_##T(d)                                                \
                 : "l"(memory + INDEX), REG_##T(a[INDEX])                        \
                 : "memory");                                                    \
    old[INDEX] = d;                                                              \
  }                                                                              \
  extern "C" __global__ void atom_shared_##name(T* memory, const T* a, T* old) { \
    __shared__ T place[64];                                                      \
    place[threadIdx.x] = memory[INDEX];                                          \
    __syncthreads();                                                             \
    T d;                                                                         \
    asm volatile("atom.shared." op " %0, [%1], %2;"                              \
                 : "=" REG_##T(d)                                                \
                 : "r"(shared_address(place + threadIdx.x)), REG_##T(a[INDEX])   \
                 : "memory");                                                    \
    __syncthreads();                                                             \
    old[INDEX] = d;                                                              \
    memory[INDEX] = place[threadIdx.x];                                          \
  }
#define REDUCTION(name, op, T)                                                                       \
  extern "C" __global__ void red_global_##name(T* memory, const T* a) {                              \
    asm volatile("red.global." op " [%0], %1;" ::"l"(memory + INDEX), REG_##T(a[INDEX]) : "memory"); \
  }
#define ON_ONE_PLACE(name, op, T)                                                                        \
  extern "C" __global__ void red_same_##name(T* memory, const T* a) {                                    \
    asm volatile("red.relaxed.gpu.global." op " [%0], %1;" ::"l"(memory), REG_##T(a[INDEX]) : "memory"); \
  }
#define BOTH(name, op, T) ATOMIC(name, op, T) REDUCTION(name, op, T) ON_ONE_PLACE(name, op, T)

BOTH(add_u32, "add.u32", b32)
BOTH(add_s32, "add.s32", b32)
BOTH(add_u64, "add.u64", b64)
BOTH(add_f32, "add.f32", b32)
BOTH(add_f64, "add.f64", b64)
BOTH(add_noftz_f16, "add.noftz.f16", b16)
BOTH(add_noftz_f16x2, "add.noftz.f16x2", b32)
BOTH(min_s32, "min.s32", b32)
BOTH(min_u32, "min.u32", b32)
BOTH(min_s64, "min.s64", b64)
BOTH(min_u64, "min.u64", b64)
BOTH(max_s32, "max.s32", b32)
BOTH(max_u32, "max.u32", b32)
BOTH(max_s64, "max.s64", b64)
BOTH(max_u64, "max.u64", b64)
BOTH(and_b32, "and.b32", b32)
BOTH(and_b64, "and.b64", b64)
BOTH(or_b32, "or.b32", b32)
BOTH(or_b64, "or.b64", b64)
BOTH(xor_b32, "xor.b32", b32)
BOTH(xor_b64, "xor.b64", b64)
ATOMIC(inc_u32, "inc.u32", b32)
ATOMIC(dec_u32, "dec.u32", b32)
REDUCTION(inc_u32, "inc.u32", b32)
REDUCTION(dec_u32, "dec.u32", b32)
ATOMIC(exch_b32, "exch.b32", b32)
ATOMIC(exch_b64, "exch.b64", b64)

#define COMPARE_AND_SWAP(T)                                                                      \
  extern "C" __global__ void atom_cas_##T(T* memory, const T* compare, const T* value, T* old) { \
    T d;                                                                                         \
    asm volatile("atom.global.cas." #T " %0, [%1], %2, %3;"                                      \
                 : "=" REG_##T(d)                                                                \
                 : "l"(memory + INDEX), REG_##T(compare[INDEX]), REG_##T(value[INDEX])           \
                 : "memory");                                                                    \
    old[INDEX] = d;                                                                              \
  }
COMPARE_AND_SWAP(b16)
COMPARE_AND_SWAP(b32)
COMPARE_AND_SWAP(b64)

// All threads of the grid draw a ticket: every old value is met once.
extern "C" __global__ void tickets(b32* counter, b32* drawn) {
  b32 d;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(d) : "l"(counter) : "memory");
  atomicAdd(drawn + d, 1);
}
