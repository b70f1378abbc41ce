// Vectors of the target: kLanes floats, and the few operations that the kernels build on. Arithmetic and comparisons
// are the compiler's own on vector types; an intrinsic stands where the plain form would be slower.
#pragma once

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

#define MHA_INLINE inline __attribute__((always_inline))

constexpr int kLanes = MHA_CPU_VECTOR_BYTES / 4;
typedef float Vec __attribute__((vector_size(MHA_CPU_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(MHA_CPU_VECTOR_BYTES)));  // of a comparison: -1 is true
typedef uint32_t BitVec __attribute__((vector_size(MHA_CPU_VECTOR_BYTES)));

// In memory, at any address of an element, which may have 16 bits.
typedef float VecInMemory __attribute__((vector_size(MHA_CPU_VECTOR_BYTES), aligned(2), may_alias));
typedef int32_t IntVecInMemory __attribute__((vector_size(MHA_CPU_VECTOR_BYTES), aligned(2), may_alias));

MHA_INLINE Vec load(const float* from) { return *reinterpret_cast<const VecInMemory*>(from); }
MHA_INLINE IntVec load(const int32_t* from) { return *reinterpret_cast<const IntVecInMemory*>(from); }
MHA_INLINE void store(float* to, Vec x) { *reinterpret_cast<VecInMemory*>(to) = x; }

MHA_INLINE BitVec bits_of(Vec x) { return reinterpret_cast<BitVec>(x); }
MHA_INLINE Vec from_bits(BitVec x) { return reinterpret_cast<Vec>(x); }

#if MHA_CPU_VECTOR_BYTES == 64
MHA_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
MHA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
MHA_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
#elif MHA_CPU_VECTOR_BYTES == 32
MHA_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
MHA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
MHA_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
#elif defined(__aarch64__)
MHA_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
MHA_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
MHA_INLINE Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN
#elif defined(__SSE2__)
MHA_INLINE Vec broadcast(float x) { return _mm_set1_ps(x); }
MHA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
MHA_INLINE Vec max(Vec a, Vec b) { return _mm_max_ps(a, b); }  // b where either is NaN
#else
MHA_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
MHA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
MHA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
#endif
MHA_INLINE IntVec broadcast(int32_t x) { return x - IntVec{}; }

MHA_INLINE IntVec load_bytes(const uint8_t* from) {
#if MHA_CPU_VECTOR_BYTES == 64
  const __m256i halves = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(halves));
#elif MHA_CPU_VECTOR_BYTES == 32
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return IntVec{from[0], from[1], from[2], from[3]};
#endif
}

// Per lane: NaN where either is.
MHA_INLINE Vec max_with_nan(Vec a, Vec b) { return a == a ? max(a, b) : a; }

// All lanes put together by combine(a, b), halves first; it takes vectors of any length.
template <typename Combine>
MHA_INLINE float fold_lanes(Vec x, const Combine& combine) {
  typedef float Four __attribute__((vector_size(16)));
#if MHA_CPU_VECTOR_BYTES == 64
  const __m256 eight = combine(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  Four y = combine(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif MHA_CPU_VECTOR_BYTES == 32
  Four y = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  Four y = x;
#endif
  y = combine(y, Four{y[2], y[3], y[2], y[3]});
  return combine(y, Four{y[1], y[1], y[1], y[1]})[0];
}

MHA_INLINE float sum_lanes(Vec x) {
  return fold_lanes(x, [](auto a, auto b) { return a + b; });
}

// NaN where a lane is.
MHA_INLINE float max_lanes(Vec x) {
  return fold_lanes(x, [](auto a, auto b) { return ((a > b) | (a != a)) ? a : b; });
}

// to[i] = the sum of the lanes of x[i], for four vectors.
MHA_INLINE void sum_lanes_of_four(const Vec* x, float* to) {
#if MHA_CPU_VECTOR_BYTES >= 32
  __m256 half[4];
  for (int i = 0; i < 4; ++i) {
#if MHA_CPU_VECTOR_BYTES == 64
    half[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
#else
    half[i] = x[i];
#endif
  }
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif defined(__aarch64__)
  store(to, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
#elif defined(__SSE2__)
  Vec a = x[0], b = x[1], c = x[2], d = x[3];
  _MM_TRANSPOSE4_PS(a, b, c, d);
  store(to, (a + b) + (c + d));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum_lanes(x[i]);
#endif
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
