// 16-bit floating point formats, and rounding into them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace gpusim {

enum class Rounding : std::uint8_t { nearest_even, zero, down, up, nearest_away };

// Storage types: a distinct type for each format, so that templates can tell them apart.
struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

inline float to_float(Half h) {
#if defined(__F16C__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h.bits)));
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(h.bits & 0x8000) << 16;
  const std::uint32_t exponent = (h.bits >> 10) & 31, mantissa = h.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

inline float to_float(BFloat b) { return std::bit_cast<float>(static_cast<std::uint32_t>(b.bits) << 16); }

// Rounds a finite double to a format with `mantissa` stored bits and exponents from `min_exponent` (of the smallest
// normal) to `max_exponent`. Returns the rounded magnitude as a double; overflow gives infinity or the largest value,
// by the mode.
inline double round_to_format(double value, int mantissa, int min_exponent, int max_exponent, Rounding mode) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), min_exponent);
  const double unit = std::ldexp(1.0, exponent - mantissa);
  const double scaled = value / unit;  // exact: a power of two
  double rounded = 0;
  switch (mode) {
    case Rounding::nearest_even: rounded = std::nearbyint(scaled); break;
    case Rounding::zero: rounded = std::trunc(scaled); break;
    case Rounding::down: rounded = std::floor(scaled); break;
    case Rounding::up: rounded = std::ceil(scaled); break;
    case Rounding::nearest_away: rounded = std::round(scaled); break;
  }
  const double result = rounded * unit;
  const double largest = (2 - std::ldexp(1.0, -mantissa)) * std::ldexp(1.0, max_exponent);
  if (std::fabs(result) <= largest) return rounded == 0 ? std::copysign(0.0, value) : result;
  const bool clamp =
      mode == Rounding::zero || (mode == Rounding::down && value > 0) || (mode == Rounding::up && value < 0);
  return std::copysign(clamp ? largest : std::numeric_limits<double>::infinity(), value);
}

inline Half double_to_half(double value, Rounding mode = Rounding::nearest_even) {
  if (std::isnan(value)) return {0x7fff};
  const double rounded = round_to_format(value, 10, -14, 15, mode);
  const std::uint16_t sign = std::signbit(rounded) ? 0x8000 : 0;
  const double magnitude = std::fabs(rounded);
  if (std::isinf(magnitude)) return {static_cast<std::uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x1p-14) return {static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(magnitude * 0x1p24))};
  const int exponent = std::ilogb(magnitude);
  const auto mantissa = static_cast<std::uint16_t>(std::ldexp(magnitude, 10 - exponent));
  return {static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | (mantissa & 1023))};
}

inline Half to_half(float value) {
  if (value != value) return {0x7fff};  // the canonical NaN of the conversion instructions
#if defined(__F16C__)
  return {static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), 0)))};
#else
  return double_to_half(value);
#endif
}

inline BFloat to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<std::uint16_t>(value != value ? 0x7fff : rounded)};
}

inline BFloat double_to_bfloat(double value, Rounding mode = Rounding::nearest_even) {
  if (std::isnan(value)) return {0x7fff};
  const auto rounded = static_cast<float>(round_to_format(value, 7, -126, 127, mode));
  return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(rounded) >> 16)};
}

// An exact sum a + b, rounded to odd in double: rounding it again to a narrower format gives the correctly rounded
// result.
inline double add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - a;
  const double error = (a - (sum - part)) + (b - part);
  auto bits = std::bit_cast<std::int64_t>(sum);
  if (error == 0 || (bits & 1)) return sum;
  bits += ((error > 0) == (sum > 0)) ? 1 : -1;
  return std::bit_cast<double>(bits);
}

template <class T>
inline T from_float(float value);
template <>
inline Half from_float<Half>(float value) {
  return to_half(value);
}
template <>
inline BFloat from_float<BFloat>(float value) {
  return to_bfloat(value);
}
template <class T>
inline T from_double(double value, Rounding mode);
template <>
inline Half from_double<Half>(double value, Rounding mode) {
  return double_to_half(value, mode);
}
template <>
inline BFloat from_double<BFloat>(double value, Rounding mode) {
  return double_to_bfloat(value, mode);
}

}  // namespace gpusim
