// Eight numbers at a time: rows of the 8 x 8 tiles that the fragments of matrix instructions are made of.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "half.h"

namespace gpusim {

using Row = float __attribute__((vector_size(32)));
using HalfRow = float __attribute__((vector_size(16)));  // the even or the odd columns of one
using Row16 = std::uint16_t __attribute__((vector_size(16)));
using RowBits = std::uint32_t __attribute__((vector_size(32)));

template <class V>
[[gnu::always_inline]] inline V load_row(const void* from) {
  V row;
  std::memcpy(&row, from, sizeof row);
  return row;
}

template <class V>
[[gnu::always_inline]] inline void store_row(void* to, V row) {
  std::memcpy(to, &row, sizeof row);
}

template <class H>
[[gnu::always_inline]] inline Row widen(Row16 halves) {
  if constexpr (std::is_same_v<H, BFloat>) {
    return std::bit_cast<Row>(__builtin_convertvector(halves, RowBits) << 16);
  } else {
#if defined(__F16C__)
    return std::bit_cast<Row>(_mm256_cvtph_ps(std::bit_cast<__m128i>(halves)));
#else
    Row row;
    for (int i = 0; i < 8; ++i) row[i] = to_float(Half{halves[i]});
    return row;
#endif
  }
}

// Rounds as to_half() does.
[[gnu::always_inline]] inline Row16 narrow_to_half(Row row) {
#if defined(__F16C__)
  const auto halves = std::bit_cast<Row16>(_mm256_cvtps_ph(std::bit_cast<__m256>(row), 0));
  const auto nan = __builtin_convertvector(row != row, Row16);
  return (halves & ~nan) | (nan & 0x7fff);
#else
  Row16 halves;
  for (int i = 0; i < 8; ++i) halves[i] = to_half(row[i]).bits;
  return halves;
#endif
}

// a b + c, rounded once
[[gnu::always_inline]] inline Row fused(float a, Row b, Row c) {
#if defined(__FMA__)
  return std::bit_cast<Row>(_mm256_fmadd_ps(_mm256_set1_ps(a), std::bit_cast<__m256>(b), std::bit_cast<__m256>(c)));
#else
  for (int i = 0; i < 8; ++i) c[i] = std::fma(a, b[i], c[i]);
  return c;
#endif
}

// Row i meets row i + 4 element by element: three times, and the tile lies on its other side.
[[gnu::always_inline]] inline void transpose(Row16 (&tile)[8]) {
  for (int round = 0; round < 3; ++round) {
    Row16 next[8];
    for (int i = 0; i < 4; ++i) {
      next[2 * i] = __builtin_shufflevector(tile[i], tile[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * i + 1] = __builtin_shufflevector(tile[i], tile[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) tile[i] = next[i];
  }
}

[[gnu::always_inline]] inline void transpose(Row (&tile)[8]) {
  Row a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(tile[i], tile[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[i + 1] = __builtin_shufflevector(tile[i], tile[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = i; j < i + 2; ++j) {
      b[j] = __builtin_shufflevector(a[j], a[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[j + 2] = __builtin_shufflevector(a[j], a[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    tile[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    tile[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

}  // namespace gpusim
