// Single operations of fp32 and fp64 as PTX defines them.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>

#include "half.h"

namespace gpusim {

inline float flush(float x) {  // .ftz: subnormals become zero, with their sign
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return (bits & 0x7f800000u) == 0 ? std::bit_cast<float>(bits & 0x80000000u) : x;
}
inline double flush(double x) { return x; }

template <class T>
T saturate(T x) {
  return x > T{0} ? (x < T{1} ? x : T{1}) : T{0};
}  // NaN becomes 0

// The minimum of IEEE 754-2019 minimumNumber: -0 below +0, a NaN loses against a number.
inline float min_number(float a, float b) {
  const bool less = a < b || (a == b && std::bit_cast<std::int32_t>(a) < 0);
  return b != b ? (a != a ? std::bit_cast<float>(0x7fffffffu) : a) : (less ? a : b);
}
inline float max_number(float a, float b) {
  const bool greater = a > b || (a == b && std::bit_cast<std::int32_t>(a) >= 0);
  return b != b ? (a != a ? std::bit_cast<float>(0x7fffffffu) : a) : (greater ? a : b);
}
inline double min_number(double a, double b) {
  const bool less = a < b || (a == b && std::signbit(a));
  return b != b ? a : (less ? a : b);
}
inline double max_number(double a, double b) {
  const bool greater = a > b || (a == b && !std::signbit(a));
  return b != b ? a : (greater ? a : b);
}
template <class T>
T min_nan(T a, T b) {
  return a != a || b != b
             ? std::bit_cast<T>(static_cast<std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>(
                   sizeof(T) == 4 ? 0x7fffffffull : 0x7fffffffffffffffull))
             : min_number(a, b);
}
template <class T>
T max_nan(T a, T b) {
  return a != a || b != b ? min_nan(a, b) : max_number(a, b);
}

// Directed rounding of fp32: exact or rounded to odd in fp64, then rounded once: to the nearest, and one step back when
// that went the wrong way.
inline float step(float x, bool up) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  if (x == 0) return up ? std::bit_cast<float>(1) : std::bit_cast<float>(static_cast<std::int32_t>(0x80000001u));
  return std::bit_cast<float>((bits >= 0) == up ? bits + 1 : bits - 1);
}
inline float round_float(double x, Rounding mode) {
  const auto nearest = static_cast<float>(x);
  const auto back = static_cast<double>(nearest);
  const bool too_high = back > x, too_low = back < x;
  if (mode == Rounding::down || (mode == Rounding::zero && x > 0)) return too_high ? step(nearest, false) : nearest;
  if (mode == Rounding::up || mode == Rounding::zero) return too_low ? step(nearest, true) : nearest;
  return nearest;
}
inline float sum_directed(double a, double b, Rounding mode) {
  const double sum = add_to_odd(a, b);
  if (sum == 0 && std::signbit(a) != std::signbit(b)) return mode == Rounding::down ? -0.0f : 0.0f;
  return round_float(sum, mode);
}
inline float add_directed(float a, float b, Rounding mode) { return sum_directed(a, b, mode); }
inline float mul_directed(float a, float b, Rounding mode) { return round_float(static_cast<double>(a) * b, mode); }
inline float fma_directed(float a, float b, float c, Rounding mode) {
  return sum_directed(static_cast<double>(a) * b, c, mode);
}
// The same for fma and one mode, without branches: the nearest, and one step down if that is above the exact value,
// which is sum + error.
inline float fma_down(float a, float b, float c) {
  const float nearest = std::fma(a, b, c);
  const double product = static_cast<double>(a) * b, addend = c, sum = product + addend;
  const double part = sum - product, error = (product - (sum - part)) + (addend - part);
  const std::int32_t bits = std::bit_cast<std::int32_t>(nearest);
  const std::int32_t below = nearest == 0 ? static_cast<std::int32_t>(0x80000001u) : bits >= 0 ? bits - 1 : bits + 1;
  const bool too_high = (sum - nearest) + error < 0;
  const bool cancelled =
      sum == 0 && std::bit_cast<std::int64_t>(product) < 0 != std::bit_cast<std::int64_t>(addend) < 0;
  return std::bit_cast<float>(too_high ? below : cancelled ? static_cast<std::int32_t>(0x80000000u) : bits);
}
inline double to_odd(double nearest, double residual) {  // residual: exact value minus nearest, any scale
  auto bits = std::bit_cast<std::int64_t>(nearest);
  const bool exact = !(residual < 0 || residual > 0);  // NaN: something was divided by infinity
  if (exact || (bits & 1) || !std::isfinite(nearest)) return nearest;
  bits += ((residual > 0) == (nearest > 0)) ? 1 : -1;
  return std::bit_cast<double>(bits);
}
inline float div_directed(float a, float b, Rounding mode) {
  const double q = static_cast<double>(a) / b;
  return round_float(to_odd(q, std::fma(-q, static_cast<double>(b), static_cast<double>(a)) * (b < 0 ? -1 : 1)), mode);
}
inline float sqrt_directed(float a, Rounding mode) {
  const double r = std::sqrt(static_cast<double>(a));
  return round_float(to_odd(r, std::fma(-r, r, static_cast<double>(a))), mode);
}

// fp64 with another rounding mode: the host's.
template <class F>
[[gnu::noinline]] double with_rounding(Rounding mode, F f) {
  const int saved = std::fegetround();
  std::fesetround(mode == Rounding::zero   ? FE_TOWARDZERO
                  : mode == Rounding::down ? FE_DOWNWARD
                  : mode == Rounding::up   ? FE_UPWARD
                                           : FE_TONEAREST);
  volatile double result = f();
  std::fesetround(saved);
  return result;
}

}  // namespace gpusim
