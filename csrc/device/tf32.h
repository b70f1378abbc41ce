// fp32 numbers for the TF32 tensor cores, which read the upper 19 bits of a register (10 of the fraction) and ignore
// the rest.
//
// One product, kProducts = 1: a number is rounded to what is read of it.
// Three, kProducts = 3: a number x is high + low, rounded to nearest each, and a b = low high + high low + high high,
// exact to about 2^-22.
//
// What is not finite makes its product NaN where there are three: the low part of an infinity is NaN.
#pragma once

#include <cstdint>

#include "device/ptx/mma.h"

namespace mha_ext {

// kWords elements of an operand of mma.sync.
template <int kProducts, int kWords>
struct Tf32Operand {
  static_assert(kProducts == 1 || kProducts == 3, "one product or three");
  uint32_t high[kWords];
  uint32_t low[kProducts == 3 ? kWords : 1];

  __device__ __forceinline__ void set(int word, float x) {
    if constexpr (kProducts == 1) {
      // Half a unit of the last place that is read, on average over the fraction: one instruction, and NaN and
      // infinity stay, as do numbers that TF32 holds. (Adding half a unit to the bits would lose some NaNs.)
      constexpr float kHalfUnit = 1.0f + 0.72f / 2048;
      high[word] = __float_as_uint(x * kHalfUnit);
    } else {
      constexpr uint32_t kRead = 0xffffe000, kHalfUnit = 0x1000;
      high[word] = (__float_as_uint(x) + kHalfUnit) & kRead;
      low[word] = __float_as_uint(x - __uint_as_float(high[word]));
    }
  }
};

// acc[i][n_begin + j] (+)= a[i] b[j] for m16n8k8 tiles; b holds two words a tile. kFirst: acc held nothing before.
template <bool kFirst, int kProducts, int kMmaM, int kMmaN, int kWords>
__device__ __forceinline__ void multiply_tf32(float (&acc)[kMmaM][kMmaN][4], int n_begin,
                                              const Tf32Operand<kProducts, 4> (&a)[kMmaM],
                                              const Tf32Operand<kProducts, kWords>& b) {
  // The small products first. Tiles in the inner loops: neighbouring mma do not wait for one another.
#pragma unroll
  for (int product = 3 - kProducts; product < 3; ++product) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      const uint32_t (&a_words)[4] = [&]() -> const uint32_t (&)[4] {
        if constexpr (kProducts == 3) {
          if (product == 0) return a[i].low;
        }
        return a[i].high;
      }();
#pragma unroll
      for (int j = 0; j < kWords / 2; ++j) {
        const uint32_t* const b_words = (product == 1 ? b.low : b.high) + 2 * j;
        if (kFirst && product == 3 - kProducts) {
          ptx::mul_m16n8k8_tf32(acc[i][n_begin + j], a_words, b_words[0], b_words[1]);
        } else {
          ptx::mma_m16n8k8_tf32(acc[i][n_begin + j], a_words, b_words[0], b_words[1]);
        }
      }
    }
  }
}

}  // namespace mha_ext
