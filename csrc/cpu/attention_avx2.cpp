// The kernels for AVX2, FMA and F16C.
#include "cpu/kernel/includes.h"

#if defined(__x86_64__)
#define MHA_CPU_TARGET avx2
#define MHA_CPU_VECTOR_BYTES 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "cpu/kernel/entry_points.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
