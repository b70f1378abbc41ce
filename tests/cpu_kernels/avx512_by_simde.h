// AVX-512 intrinsics as functions of AVX2 code, included ahead of a kernel's source (-include): SIMDe under the names
// of Intel, and what SIMDe lacks or does otherwise. intrinsics.cpp compares each with its definition.
#pragma once

#if defined(__AVX512F__)
#error "to be compiled for AVX2: with AVX-512 the intrinsics would be the processor's own"
#endif

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstdint>
#include <cstring>

namespace by_simde {

template <int kRounding>
inline __m256i cvtps_ph(__m512 x) {
  __m256 half[2];
  std::memcpy(half, &x, sizeof(x));
  return _mm256_set_m128i(_mm256_cvtps_ph(half[1], kRounding), _mm256_cvtps_ph(half[0], kRounding));
}

// SIMDe reads all elements and drops some; the processor touches none that the mask leaves out.
inline __m512i maskz_loadu_epi16(uint32_t mask, const void* from) {
  uint16_t element[32] = {};
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1u) std::memcpy(element + i, static_cast<const char*>(from) + 2 * i, 2);
  }
  __m512i x;
  std::memcpy(&x, element, sizeof(x));
  return x;
}

inline __m256i cvtepi32_epi16(__m512i x) {
  uint32_t from[16];
  uint16_t element[16];
  std::memcpy(from, &x, sizeof(x));
  for (int i = 0; i < 16; ++i) element[i] = static_cast<uint16_t>(from[i]);
  __m256i to;
  std::memcpy(&to, element, sizeof(to));
  return to;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  if ((bits & 0x7F800000u) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000u);         // zero, subnormal
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  float from[32];
  uint16_t element[32];
  std::memcpy(from, &lower, sizeof(lower));
  std::memcpy(from + 16, &upper, sizeof(upper));
  for (int i = 0; i < 32; ++i) element[i] = to_bf16(from[i]);
  __m512bh x;
  std::memcpy(&x, element, sizeof(x));
  return x;
}

}  // namespace by_simde

#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) by_simde::cvtps_ph<rounding>(x)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(x) by_simde::cvtepi32_epi16(x)
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16(mask, from) by_simde::maskz_loadu_epi16(mask, from)
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(upper, lower) by_simde::cvtne2ps_pbh(upper, lower)
