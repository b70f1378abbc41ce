// The kernels of bf16 for AVX-512 F, BW, VL, DQ and BF16; other types are left to those for AVX-512.
#include "cpu/kernel/includes.h"

#if defined(__x86_64__)
#define MHA_CPU_TARGET avx512_bf16
#define MHA_CPU_VECTOR_BYTES 64
#define MHA_CPU_BF16_PAIRS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif
#include "cpu/kernel/attention.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
