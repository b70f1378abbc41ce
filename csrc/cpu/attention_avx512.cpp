// The kernels for AVX-512 F, BW, VL and DQ.
#include "cpu/kernel/includes.h"

#if defined(__x86_64__)
#define MHA_CPU_TARGET avx512
#define MHA_CPU_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#include "cpu/kernel/entry_points.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
