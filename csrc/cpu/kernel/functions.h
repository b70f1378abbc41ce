// exp, log and tanh of vectors.
#pragma once

#include "cpu/kernel/simd.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// 2^f for |f| <= 1/2: the polynomial of degree 5 with p(0) = 1 that fits best in relative error, 1.5 * 2^-24.
MHA_INLINE Vec exp2_of_fraction(Vec f) {
  Vec p = broadcast(0.00132647f);
  p = fma(p, f, broadcast(0.00967151f));
  p = fma(p, f, broadcast(0.05550734f));
  p = fma(p, f, broadcast(0.24022242f));
  p = fma(p, f, broadcast(0.69314698f));
  return fma(p, f, broadcast(1.f));
}

// 1.5 * 2^23: a sum with it is rounded to an integer, which its lowest bits hold; here with the bias of exponents, so
// that shifted to where those stand they are a power of two.
constexpr float kRound = 12582912.f + 127.f;

// exp(x) for x <= 0, within 3 * 2^-24 relatively. Results below 2^-126 are 0, -inf gives 0, NaN stays NaN.
MHA_INLINE Vec exp_of_negative(Vec x) {
  x = max(broadcast(-88.1f), x);  // 2^-127, whose bits are those of 0
  const Vec shifted = fma(x, broadcast(kLog2E), broadcast(kRound));
  const Vec f = fma(x, broadcast(kLog2E), broadcast(kRound) - shifted);
  return exp2_of_fraction(f) * from_bits(bits_of(shifted) << 23);
}

// The same of 2^x: two products fewer.
MHA_INLINE Vec exp2_of_negative(Vec x) {
  x = max(broadcast(-127.f), x);
  const Vec shifted = x + broadcast(kRound);
  const Vec f = x - (shifted - broadcast(kRound));
  return exp2_of_fraction(f) * from_bits(bits_of(shifted) << 23);
}

// Natural logarithm of x >= 2^-126, by the polynomial of the Cephes library (Moshier): x = 2^n m with m in
// [sqrt(1/2), sqrt(2)). Within 1e-7 relatively; log(1) is 0; infinity and NaN do not stay what they are.
MHA_INLINE Vec log(Vec x) {
  const BitVec shifted = bits_of(x) - 0x3F3504F3u;  // of sqrt(1/2)
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) >> 23;
  const Vec n = __builtin_convertvector(exponent, Vec);
  const Vec f = from_bits((shifted & 0x007FFFFFu) + 0x3F3504F3u) - broadcast(1.f), square = f * f;
  Vec p = broadcast(7.0376836292e-2f);
  p = fma(p, f, broadcast(-1.1514610310e-1f));
  p = fma(p, f, broadcast(1.1676998740e-1f));
  p = fma(p, f, broadcast(-1.2420140846e-1f));
  p = fma(p, f, broadcast(1.4249322787e-1f));
  p = fma(p, f, broadcast(-1.6668057665e-1f));
  p = fma(p, f, broadcast(2.0000714765e-1f));
  p = fma(p, f, broadcast(-2.4999993993e-1f));
  p = fma(p, f, broadcast(3.3333331174e-1f));
  const Vec tail = fma(p * f, square, fma(broadcast(-0.5f), square, n * broadcast(-2.12194440e-4f)));
  return fma(n, broadcast(0.693359375f), f + tail);
}

// tanh: near 0 the odd polynomial of the Cephes library (Moshier), elsewhere (1 - e) / (1 + e) with e = exp(-2|x|).
// Within 2e-7 relatively.
MHA_INLINE Vec tanh(Vec x) {
  const BitVec sign = bits_of(x) & 0x80000000u;
  const Vec magnitude = from_bits(bits_of(x) & 0x7FFFFFFFu);
  const Vec e = exp_of_negative(broadcast(-2.f) * magnitude);
  const Vec far = (broadcast(1.f) - e) / (broadcast(1.f) + e);
  const Vec square = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vec near = fma(p * square, x, x);
  return magnitude < broadcast(0.625f) ? near : from_bits(bits_of(far) | sign);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
