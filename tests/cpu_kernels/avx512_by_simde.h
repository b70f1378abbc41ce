// AVX-512 intrinsics as functions of AVX2 code, included ahead of a kernel's source (-include): SIMDe under the names
// of Intel, and what SIMDe lacks. intrinsics.cpp compares each with its definition.
#pragma once

#if defined(__AVX512F__)
#error "to be compiled for AVX2: with AVX-512 the intrinsics would be the processor's own"
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
