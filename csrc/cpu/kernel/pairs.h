// Pairs of bf16 in the 32-bit lanes of a vector, the first in the lower half: what the instructions of AVX512_BF16
// take.
#pragma once

#include "cpu/kernel/products.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Pairs lie in vectors of floats, as the bits of one.
struct Pairs {
  using Element = BFloat16;
  static constexpr int kStep = 2;

  static MHA_INLINE Vec broadcast_key(const BFloat16* from) {
    float pair;
    std::memcpy(&pair, from, sizeof(pair));
    return broadcast(pair);
  }

  // sum + a.first * b.first + a.second * b.second per lane, in fp32.
  static MHA_INLINE Vec add(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

// For each lane of a result the places of its two halves: lane and lane + distance of a list that starts at `first`.
struct alignas(64) HalfPlaces {
  uint16_t at[2 * kLanes];

  constexpr HalfPlaces(int first, int distance) : at() {
    for (int lane = 0; lane < kLanes; ++lane) {
      at[2 * lane] = static_cast<uint16_t>(first + lane);
      at[2 * lane + 1] = static_cast<uint16_t>(first + lane + distance);
    }
  }
  MHA_INLINE __m512i get() const { return _mm512_load_si512(at); }
};

// Two vectors, rounded to nearest even.
MHA_INLINE Vec round_to_pairs(Vec first, Vec second) {
  static constexpr HalfPlaces kPlaces(0, kLanes);
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  return reinterpret_cast<Vec>(_mm512_permutexvar_epi16(kPlaces.get(), halves));
}

// Elements of a row of which those set in `mask` are read; the others are 0.
MHA_INLINE __m512i load_halves(const BFloat16* from, uint32_t mask) { return _mm512_maskz_loadu_epi16(mask, from); }

// Pairs (first[i], second[i]) of the lower and the upper 16 elements of two rows.
MHA_INLINE Vec pair_lower(__m512i first, __m512i second) {
  static constexpr HalfPlaces kPlaces(0, 2 * kLanes);
  return reinterpret_cast<Vec>(_mm512_permutex2var_epi16(first, kPlaces.get(), second));
}
MHA_INLINE Vec pair_upper(__m512i first, __m512i second) {
  static constexpr HalfPlaces kPlaces(kLanes, 2 * kLanes);
  return reinterpret_cast<Vec>(_mm512_permutex2var_epi16(first, kPlaces.get(), second));
}

// Four neighbouring pairs of 16 rows: to[i * stride] gets pair i of every row.
MHA_INLINE void transpose_pairs(const BFloat16* const* rows, int64_t offset, float* to, int64_t stride) {
  __m512i x[4];  // 128-bit lane l of x[i] is of row 4 l + i
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset)); };
    x[i] = _mm512_castsi128_si512(part(i));
    x[i] = _mm512_inserti32x4(x[i], part(4 + i), 1);
    x[i] = _mm512_inserti32x4(x[i], part(8 + i), 2);
    x[i] = _mm512_inserti32x4(x[i], part(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi64(a, c));
  _mm512_storeu_si512(to + stride, _mm512_unpackhi_epi64(a, c));
  _mm512_storeu_si512(to + 2 * stride, _mm512_unpacklo_epi64(b, d));
  _mm512_storeu_si512(to + 3 * stride, _mm512_unpackhi_epi64(b, d));
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
