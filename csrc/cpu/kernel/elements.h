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

// Calls use(element) with one of the type.
template <typename Use>
void with_element_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat16: return use(Float16{});
    case DType::kBFloat16: return use(BFloat16{});
    default: return use(float{});
  }
}

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
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0xFFFFu);
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

// Lanes of 16 bits, one for each of a Vec.
typedef uint16_t HalfBits __attribute__((vector_size(MHA_CPU_VECTOR_BYTES / 2)));

// kLanes elements, zeros in front of each.
template <typename T>
MHA_INLINE BitVec load_bits(const T* from) {
  static_assert(sizeof(T) == 2);
  HalfBits bits;
  std::memcpy(&bits, from, sizeof(bits));
#if MHA_CPU_VECTOR_BYTES == 64
  return reinterpret_cast<BitVec>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));
#elif MHA_CPU_VECTOR_BYTES == 32
  return reinterpret_cast<BitVec>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, BitVec);
#endif
}

MHA_INLINE Vec load_as_float(const float* from) { return load(from); }
MHA_INLINE Vec load_as_float(const BFloat16* from) { return from_bits(load_bits(from) << 16); }
MHA_INLINE Vec load_as_float(const Float16* from) {
#if MHA_CPU_VECTOR_BYTES == 64
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif MHA_CPU_VECTOR_BYTES == 32
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
  const BitVec bits = load_bits(from), exponent = bits & 0x7C00u;
  const Vec scaled = from_bits((bits & 0x7FFFu) << 13) * broadcast(0x1p112f);
  const BitVec special = (exponent == 0x7C00u) & 0x7F800000;
  return from_bits(bits_of(scaled) | special | (bits & 0x8000u) << 16);
#endif
}

// Rounded as from_float rounds.
MHA_INLINE void store_rounded(float* to, Vec x) { store(to, x); }
MHA_INLINE void store_rounded(BFloat16* to, Vec x) {
  const BitVec bits = bits_of(x), rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  const BitVec halves = (rounded | reinterpret_cast<BitVec>(x != x)) >> 16;
#if MHA_CPU_VECTOR_BYTES == 32
  const __m256i y = reinterpret_cast<__m256i>(halves);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
#else
  const HalfBits narrow = __builtin_convertvector(halves, HalfBits);
  std::memcpy(to, &narrow, sizeof(narrow));
#endif
}
MHA_INLINE void store_rounded(Float16* to, Vec x) {
#if MHA_CPU_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif MHA_CPU_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
#else
  for (int i = 0; i < kLanes; ++i) from_float(x[i], to[i]);
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
  for (; i + kLanes <= count; i += kLanes) store_rounded(to + i, load(from + i) * broadcast(factor));
  for (; i < count; ++i) from_float(from[i] * factor, to[i]);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
