// One kernel per form of an instruction: out[i] = instruction(a[i], ...). Values are raw bits; the kernel is named as
// the form, with underscores. Launched with exactly one thread per element.
#pragma once
#include <cstdint>

using b16 = uint16_t;
using b32 = uint32_t;
using b64 = uint64_t;

// How asm names a register of that type.
#define REG_b16 "h"
#define REG_b32 "r"
#define REG_b64 "l"

#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

#define UNARY(name, text, D, A)                                         \
  extern "C" __global__ void name(const A* a, D* out) {                 \
    D d;                                                                \
    asm volatile(text " %0, %1;" : "=" REG_##D(d) : REG_##A(a[INDEX])); \
    out[INDEX] = d;                                                     \
  }

#define BINARY(name, text, D, A, B)                                                            \
  extern "C" __global__ void name(const A* a, const B* b, D* out) {                            \
    D d;                                                                                       \
    asm volatile(text " %0, %1, %2;" : "=" REG_##D(d) : REG_##A(a[INDEX]), REG_##B(b[INDEX])); \
    out[INDEX] = d;                                                                            \
  }

#define TERNARY(name, text, D, A, B, C)                                                                               \
  extern "C" __global__ void name(const A* a, const B* b, const C* c, D* out) {                                       \
    D d;                                                                                                              \
    asm volatile(text " %0, %1, %2, %3;" : "=" REG_##D(d) : REG_##A(a[INDEX]), REG_##B(b[INDEX]), REG_##C(c[INDEX])); \
    out[INDEX] = d;                                                                                                   \
  }

#define QUATERNARY(name, text, D, A, B, C, E)                                                   \
  extern "C" __global__ void name(const A* a, const B* b, const C* c, const E* e, D* out) {     \
    D d;                                                                                        \
    asm volatile(text " %0, %1, %2, %3, %4;"                                                    \
                 : "=" REG_##D(d)                                                               \
                 : REG_##A(a[INDEX]), REG_##B(b[INDEX]), REG_##C(c[INDEX]), REG_##E(e[INDEX])); \
    out[INDEX] = d;                                                                             \
  }

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
