// A softmax over scores that arrive piece by piece, and what is left to do once all have arrived.
//
// Scores stay in natural units until the largest is subtracted: log2(e) times finfo.min would be -inf, and a row of
// finfo.min is a uniform row. A score of -inf is a key that does not take part; a NaN makes its whole row NaN.
#pragma once

#include <cmath>
#include <limits>

#include "host_device.h"

namespace mha_ext {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <typename T>
constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();

constexpr float kLog2E = 1.4426950408889634f;  // exp(x) = 2^(x kLog2E)

// The larger of two, NaN when either is.
template <typename T>
MHA_HOST_DEVICE T max_or_nan(T a, T b) {
  return (a > b || a != a) ? a : b;
}

// What scores are taken relative to: the largest of them. 0 where no key takes part, so that exp(-inf - shift) is 0.
// A score of +inf has no softmax: NaN.
template <typename T>
MHA_HOST_DEVICE T softmax_shift(T max) {
  return max == -kInfinity<T> ? T(0) : (max == kInfinity<T> ? kNaN<T> : max);
}

// What has been seen of a row so far.
template <typename T>
struct SoftmaxState {
  T max = -kInfinity<T>;  // the largest score
  T sum = T(0);           // of exp(score - softmax_shift(max))

  // The same sum, taken relative to a maximum that is not smaller.
  MHA_HOST_DEVICE void rescale(T new_max) {
    sum *= std::exp(max - softmax_shift(new_max));
    max = new_max;
  }
};

// A finished row: its weights are exp(score - shift) * inverse_sum.
template <typename T>
struct SoftmaxRow {
  T inverse_sum;
  T lse;  // log of the sum of exp

  // sum: of exp(score - shift) over the row, sink included
  MHA_HOST_DEVICE SoftmaxRow(T shift, T sum) : lse(shift + std::log(sum)) {
    // Without a key all exponentials are 0. In a NaN row those of the visible keys are NaN already, the others are 0
    // and stay so.
    const bool divisible = sum > T(0);
    inverse_sum = divisible ? T(1) / sum : (sum == T(0) ? T(0) : T(1));
  }
};

}  // namespace mha_ext
