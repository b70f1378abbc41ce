// Atomic operations, as sm_90 adds to them: bf16, and several numbers at once.
#include "form.cuh"

#define REDUCTION(name, op, T)                                                                       \
  extern "C" __global__ void red_global_##name(T* memory, const T* a) {                              \
    asm volatile("red.global." op " [%0], %1;" ::"l"(memory + INDEX), REG_##T(a[INDEX]) : "memory"); \
  }                                                                                                  \
  extern "C" __global__ void atom_global_##name(T* memory, const T* a, T* old) {                     \
    T d;                                                                                             \
    asm volatile("atom.global." op " %0, [%1], %2;"                                                  \
                 : "=" REG_##T(d)                                                                    \
                 : "l"(memory + INDEX), REG_##T(a[INDEX])                                            \
                 : "memory");                                                                        \
    old[INDEX] = d;                                                                                  \
  }
REDUCTION(add_noftz_bf16, "add.noftz.bf16", b16)
REDUCTION(add_noftz_bf16x2, "add.noftz.bf16x2", b32)

#define PAIR(name, op)                                                                                      \
  extern "C" __global__ void red_global_##name(uint2* memory, const uint2* a) {                             \
    const uint2 v = a[INDEX];                                                                               \
    asm volatile("red.global." op " [%0], {%1, %2};" ::"l"(memory + INDEX), "r"(v.x), "r"(v.y) : "memory"); \
  }                                                                                                         \
  extern "C" __global__ void atom_global_##name(uint2* memory, const uint2* a, uint2* old) {                \
    const uint2 v = a[INDEX];                                                                               \
    uint2 d;                                                                                                \
    asm volatile("atom.global." op " {%0, %1}, [%2], {%3, %4};"                                             \
                 : "=r"(d.x), "=r"(d.y)                                                                     \
                 : "l"(memory + INDEX), "r"(v.x), "r"(v.y)                                                  \
                 : "memory");                                                                               \
    old[INDEX] = d;                                                                                         \
  }
#define QUAD(name, op)                                                                                            \
  extern "C" __global__ void red_global_##name(uint4* memory, const uint4* a) {                                   \
    const uint4 v = a[INDEX];                                                                                     \
    asm volatile("red.global." op " [%0], {%1, %2, %3, %4};" ::"l"(memory + INDEX), "r"(v.x), "r"(v.y), "r"(v.z), \
                 "r"(v.w)                                                                                         \
                 : "memory");                                                                                     \
  }                                                                                                               \
  extern "C" __global__ void atom_global_##name(uint4* memory, const uint4* a, uint4* old) {                      \
    const uint4 v = a[INDEX];                                                                                     \
    uint4 d;                                                                                                      \
    asm volatile("atom.global." op " {%0, %1, %2, %3}, [%4], {%5, %6, %7, %8};"                                   \
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)                                                     \
                 : "l"(memory + INDEX), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)                                    \
                 : "memory");                                                                                     \
    old[INDEX] = d;                                                                                               \
  }
PAIR(add_v2_f32, "add.v2.f32")
QUAD(add_v4_f32, "add.v4.f32")
PAIR(add_noftz_v2_f16x2, "add.noftz.v2.f16x2")
QUAD(add_noftz_v4_f16x2, "add.noftz.v4.f16x2")
PAIR(add_noftz_v2_bf16x2, "add.noftz.v2.bf16x2")
QUAD(add_noftz_v4_bf16x2, "add.noftz.v4.bf16x2")
