// Loops over the 32 lanes of a warp, written so that the compiler turns them into vector instructions.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "program.h"

namespace gpusim {

// d[l] = f(s[l]...) for the lanes in m. d may be one of the sources. f must be harmless for the other lanes.
template <class F, class D, class... S>
[[gnu::always_inline]] inline void map_lanes(Mask m, F f, D* d, const S*... s) {
  if (m == kAllLanes) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = f(s[l]...);
    return;
  }
  D result[kLanes];
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) result[l] = f(s[l]...);
  for (int l = 0; l < kLanes; ++l) {
    if (m >> l & 1) d[l] = result[l];
  }
}

// Packs 32 flags (each 0 or -1) into a mask.
template <class I>
[[gnu::always_inline]] inline Mask pack_mask(const I* flags) {
#if defined(__AVX2__)
  if constexpr (sizeof(I) == 4) {
    Mask m = 0;
    for (int i = 0; i < 4; ++i) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + 8 * i));
      m |= static_cast<Mask>(_mm256_movemask_ps(_mm256_castsi256_ps(v))) << (8 * i);
    }
    return m;
  } else if constexpr (sizeof(I) == 8) {
    Mask m = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + 4 * i));
      m |= static_cast<Mask>(_mm256_movemask_pd(_mm256_castsi256_pd(v))) << (4 * i);
    }
    return m;
  }
#endif
  Mask m = 0;
  for (int l = 0; l < kLanes; ++l) m |= static_cast<Mask>(flags[l] & 1) << l;
  return m;
}

// The lanes where f(s[l]...) holds.
template <class F, class T, class... S>
[[gnu::always_inline]] inline Mask lanes_where(F f, const T* first, const S*... rest) {
  using I = std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>;
  alignas(32) I flags[kLanes];
  for (int l = 0; l < kLanes; ++l) flags[l] = f(first[l], rest[l]...) ? I(-1) : I(0);
  return pack_mask(flags);
}

// Calls f(lane) for every lane in m.
template <class F>
[[gnu::always_inline]] inline void for_each_lane(Mask m, F f) {
  if (m == kAllLanes) {
    for (int l = 0; l < kLanes; ++l) f(l);
    return;
  }
  for (; m; m &= m - 1) f(__builtin_ctz(m));
}

}  // namespace gpusim
