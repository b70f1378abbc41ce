// Elements of 16 bits: read as fp32, and rounded back to nearest even.
#pragma once

#include "cpu/kernel/simd.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

MHA_INLINE float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

MHA_INLINE uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}

MHA_INLINE float to_float(float x) { return x; }
MHA_INLINE float to_float(BFloat16 x) { return float_from_bits(uint32_t{x.bits} << 16); }
MHA_INLINE float to_float(Float16 x) {
  // The exponents differ by 112; a product makes subnormals right by itself, and infinity and NaN keep all ones.
  const uint32_t magnitude = uint32_t{x.bits & 0x7FFFu} << 13;
  const uint32_t special = (x.bits & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u;
  const uint32_t scaled = bits_of_float(float_from_bits(magnitude) * 0x1p112f);
  return float_from_bits(scaled | special | uint32_t{x.bits & 0x8000u} << 16);
}

MHA_INLINE void from_float(float x, float& to) { to = x; }
MHA_INLINE void from_float(float x, BFloat16& to) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0x7FC0u);
}
MHA_INLINE void from_float(float x, Float16& to) {
  const uint32_t sign = bits_of_float(x) >> 16 & 0x8000u;
  uint32_t bits = bits_of_float(x) & 0x7FFFFFFFu;
  if (bits >= 0x47800000u) {  // 65536 and more, NaN
    bits = bits > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (bits < 0x38800000u) {  // subnormal: a sum whose last place is 2^-24 rounds it
    bits = bits_of_float(float_from_bits(bits) + 0.5f) - 0x3F000000u;
  } else {
    bits = (bits + 0xFFFu + (bits >> 13 & 1u) - 0x38000000u) >> 13;
  }
  to.bits = static_cast<uint16_t>(bits | sign);
}

MHA_INLINE Vec load_as_float(const float* from) { return load(from); }

MHA_INLINE Vec load_as_float(const BFloat16* from) {
#if MHA_CPU_VECTOR_BYTES == 64
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif MHA_CPU_VECTOR_BYTES == 32
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
  Vec x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(from[i]);
  return x;
#endif
}

MHA_INLINE Vec load_as_float(const Float16* from) {
#if MHA_CPU_VECTOR_BYTES == 64
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif MHA_CPU_VECTOR_BYTES == 32
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(from[i]);
  return x;
#endif
}

// to[i] = from[i] for `count` elements; zeros up to `padded`.
template <typename T>
void read_row(const T* from, int count, int padded, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load_as_float(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
  for (; i < padded; ++i) to[i] = 0;
}

// to[i] = factor * from[i], rounded.
template <typename T>
void write_row(const float* from, float factor, int count, T* to) {
  int i = 0;
#if MHA_CPU_VECTOR_BYTES >= 32
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; i + kLanes <= count; i += kLanes)
      store(reinterpret_cast<float*>(to) + i, load(from + i) * broadcast(factor));
  }
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= count; i += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(from + i), _mm256_set1_ps(factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
  }
#endif
  for (; i < count; ++i) from_float(from[i] * factor, to[i]);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
