// Each AVX-512 intrinsic that the kernels use, against its definition in scalar code: SIMDe may be wrong where no
// processor of this machine could tell. Says what differs, and how many were compared.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

namespace {

union Vector {
  float f32[16];
  uint16_t u16[32];
  uint32_t u32[16];
  uint64_t u64[8];

  template <typename T>
  T as() const {
    T x;
    std::memcpy(&x, this, sizeof(x));
    return x;
  }
  operator __m512() const { return as<__m512>(); }
  operator __m512i() const { return as<__m512i>(); }
};

template <typename T>
Vector vector(const T& x) {
  Vector v = {};
  static_assert(sizeof(x) <= sizeof(v));
  std::memcpy(&v, &x, sizeof(x));
  return v;
}

int compared = 0, wrong = 0;

void report(const char* name, int element, uint64_t got, uint64_t expected) {
  if (wrong++ < 20) std::printf("%s, element %d: got %#lx, expected %#lx\n", name, element, got, expected);
}

void expect_bits(const char* name, const Vector& got, const Vector& expected, int elements = 16) {
  ++compared;
  for (int i = 0; i < elements; ++i) {
    if (got.u32[i] != expected.u32[i]) return report(name, i, got.u32[i], expected.u32[i]);
  }
}

// NaN of any kind for NaN; elsewhere within `tolerance`.
void expect_floats(const char* name, const Vector& got, const Vector& expected, const float* tolerance = nullptr) {
  ++compared;
  for (int i = 0; i < 16; ++i) {
    const float a = got.f32[i], b = expected.f32[i];
    const bool equal = std::isnan(b) ? std::isnan(a) : tolerance ? std::fabs(a - b) <= tolerance[i] : a == b;
    if (!equal) return report(name, i, got.u32[i], expected.u32[i]);
  }
}

std::mt19937 random_bits(1);

Vector any_bits() {
  Vector v;
  for (uint32_t& x : v.u32) x = random_bits();
  return v;
}

// Of one size mostly, so that sums round, and with what is special in between.
Vector any_floats() {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  const float special[] = {0.f, -0.f, 1.f, kInf, -kInf, kNaN, 65504.f, 65520.f, 6e-8f, 3e-5f, 1e-40f, -3e38f};
  Vector v;
  for (float& x : v.f32) {
    const uint32_t bits = random_bits();
    x = bits % 8 == 0 ? special[bits / 8 % 12] : std::ldexp(static_cast<float>(bits) - 2e9f, -31);
  }
  return v;
}

float from_bf16(uint16_t x) {
  Vector v = {};
  v.u32[0] = uint32_t{x} << 16;
  return v.f32[0];
}

float from_fp16(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float sign = x >> 15 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * HUGE_VALF;
  return sign * (exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(float(fraction), -24));
}

// To nearest, ties to even, by trying neighbours: `below` is the truncated magnitude, its step is one.
template <typename Value>
uint16_t nearest(float x, const Value& value) {
  const float magnitude = std::fabs(x);
  uint16_t low = 0, high = 0x7FFF;  // the largest whose value is not above
  while (low < high) {
    const uint16_t middle = static_cast<uint16_t>((low + high + 1) / 2);
    const float at = value(middle);
    if (!std::isnan(at) && at <= magnitude) {
      low = middle;
    } else {
      high = static_cast<uint16_t>(middle - 1);
    }
  }
  const float next = value(static_cast<uint16_t>(low + 1));
  if (std::isfinite(value(low)) && !std::isnan(next)) {
    // Infinity stands where the next finite number would.
    const uint16_t before = static_cast<uint16_t>(low - 1);
    const double step = std::isinf(next) ? double(value(low)) - value(before) : double(next) - value(low);
    const double excess = double(magnitude) - value(low);
    if (excess > step / 2 || (excess == step / 2 && low % 2 == 1)) ++low;
  }
  return static_cast<uint16_t>(low | (std::signbit(x) ? 0x8000 : 0));
}

void conversions() {
  const Vector bits = any_bits(), x = any_floats(), y = any_floats();
  Vector expected;
  for (int i = 0; i < 16; ++i) expected.u32[i] = bits.u16[i];
  expect_bits("_mm512_cvtepu16_epi32", vector(_mm512_cvtepu16_epi32(bits.as<__m256i>())), expected);

  for (int i = 0; i < 16; ++i) expected.u16[i] = static_cast<uint16_t>(bits.u32[i]);
  expect_bits("_mm512_cvtepi32_epi16", vector(_mm512_cvtepi32_epi16(bits)), expected, 8);

  for (int i = 0; i < 16; ++i) expected.f32[i] = from_fp16(bits.u16[i]);
  expect_floats("_mm512_cvtph_ps", vector(_mm512_cvtph_ps(bits.as<__m256i>())), expected);

  const Vector halves = vector(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  const Vector pairs = vector(_mm512_cvtne2ps_pbh(x, y));
  ++compared;
  for (int i = 0; i < 16; ++i) {
    const uint16_t half = halves.u16[i], right = nearest(x.f32[i], from_fp16);
    const bool equal = std::isnan(x.f32[i]) ? std::isnan(from_fp16(half)) : half == right;
    if (!equal) report("_mm512_cvtps_ph", i, half, right);
  }
  ++compared;
  for (int i = 0; i < 32; ++i) {
    const float from = i < 16 ? y.f32[i] : x.f32[i - 16];
    const bool tiny = std::fabs(from) < std::numeric_limits<float>::min();
    const uint16_t got = pairs.u16[i], right = tiny ? (std::signbit(from) ? 0x8000 : 0) : nearest(from, from_bf16);
    const bool equal = std::isnan(from) ? std::isnan(from_bf16(got)) : got == right;
    if (!equal) report("_mm512_cvtne2ps_pbh", i, got, right);
  }
}

void arithmetic() {
  const Vector a = any_floats(), b = any_floats(), c = any_floats();
  Vector expected;
  for (int i = 0; i < 16; ++i) expected.f32[i] = std::fma(a.f32[i], b.f32[i], c.f32[i]);
  expect_floats("_mm512_fmadd_ps", vector(_mm512_fmadd_ps(a, b, c)), expected);
  for (int i = 0; i < 16; ++i) expected.u32[i] = a.f32[i] > b.f32[i] ? a.u32[i] : b.u32[i];
  expect_bits("_mm512_max_ps", vector(_mm512_max_ps(a, b)), expected);
  for (uint32_t& x : expected.u32) x = a.u32[3];
  expect_bits("_mm512_set1_ps", vector(_mm512_set1_ps(a.f32[3])), expected);
  expect_bits("_mm512_set1_epi32", vector(_mm512_set1_epi32(static_cast<int>(a.u32[3]))), expected);
  const Vector bits = any_bits();
  for (int i = 0; i < 16; ++i) expected.u32[i] = bits.u32[i] << 16;
  expect_bits("_mm512_slli_epi32", vector(_mm512_slli_epi32(bits, 16)), expected);

  // Order and rounding of its two sums are not compared, and subnormal numbers, which it takes for 0, do not occur.
  Vector p, q;
  for (uint16_t& x : p.u16) x = static_cast<uint16_t>(0x3F00u + (random_bits() & 0x80FFu));
  for (uint16_t& x : q.u16) x = static_cast<uint16_t>(0x3F00u + (random_bits() & 0x80FFu));
  const Vector sum = vector(_mm512_set1_ps(a.f32[0] - a.f32[0] == 0 ? std::fmod(a.f32[0], 4.f) : 1.f));
  float tolerance[16];
  for (int i = 0; i < 16; ++i) {
    double total = sum.f32[i], size = std::fabs(total);
    for (int j = 2 * i; j < 2 * i + 2; ++j) {
      total += double(from_bf16(p.u16[j])) * from_bf16(q.u16[j]);
      size += std::fabs(double(from_bf16(p.u16[j])) * from_bf16(q.u16[j]));
    }
    expected.f32[i] = static_cast<float>(total);
    tolerance[i] = static_cast<float>(size * 0x1p-22);
  }
  const __m512 got = _mm512_dpbf16_ps(sum, p.as<__m512bh>(), q.as<__m512bh>());
  expect_floats("_mm512_dpbf16_ps", vector(got), expected, tolerance);
}

template <int kAt>
void parts() {
  const Vector a = any_bits(), b = any_bits();
  Vector expected = a;
  std::memcpy(expected.u32 + 4 * kAt, b.u32, 16);
  expect_bits("_mm512_inserti32x4", vector(_mm512_inserti32x4(a, b.as<__m128i>(), kAt)), expected);
  if constexpr (kAt < 2) {
    std::memcpy(expected.u32, a.u32 + 8 * kAt, 32);
    expect_bits("_mm512_extractf32x8_ps", vector(_mm512_extractf32x8_ps(a, kAt)), expected, 8);
  }
}

void moves() {
  const Vector a = any_bits(), b = any_bits(), at = any_bits();
  expect_bits("_mm512_castps512_ps256", vector(_mm512_castps512_ps256(a)), a, 8);
  expect_bits("_mm512_castsi512_ps", vector(_mm512_castsi512_ps(a)), a);
  expect_bits("_mm512_castps_pd", vector(_mm512_castps_pd(a)), a);
  expect_bits("_mm512_castpd_ps", vector(_mm512_castpd_ps(a.as<__m512d>())), a);
  expect_bits("_mm512_castsi128_si512", vector(_mm512_castsi128_si512(a.as<__m128i>())), a, 4);
  parts<0>();
  parts<1>();
  parts<2>();
  parts<3>();

  alignas(64) Vector memory = a;
  expect_bits("_mm512_load_si512", vector(_mm512_load_si512(&memory)), a);
  char unaligned[sizeof(Vector) + 1];
  _mm512_storeu_si512(unaligned + 1, a);
  Vector stored;
  std::memcpy(&stored, unaligned + 1, sizeof(stored));
  expect_bits("_mm512_storeu_si512", stored, a);

  Vector expected;
  for (int i = 0; i < 32; ++i) expected.u16[i] = at.u32[0] >> i & 1u ? a.u16[i] : 0;
  expect_bits("_mm512_maskz_loadu_epi16", vector(_mm512_maskz_loadu_epi16(at.u32[0], &a)), expected);

  Vector upper;
  for (int i = 0; i < 16; ++i) {
    const int from = i / 4 * 4 + i % 4 / 2;
    expected.u32[i] = i % 2 ? b.u32[from] : a.u32[from];
    upper.u32[i] = i % 2 ? b.u32[from + 2] : a.u32[from + 2];
  }
  expect_bits("_mm512_unpacklo_epi32", vector(_mm512_unpacklo_epi32(a, b)), expected);
  expect_bits("_mm512_unpackhi_epi32", vector(_mm512_unpackhi_epi32(a, b)), upper);
  expect_bits("_mm512_unpacklo_ps", vector(_mm512_unpacklo_ps(a, b)), expected);
  expect_bits("_mm512_unpackhi_ps", vector(_mm512_unpackhi_ps(a, b)), upper);
  for (int i = 0; i < 8; ++i) {
    expected.u64[i] = i % 2 ? b.u64[i - 1] : a.u64[i];
    upper.u64[i] = i % 2 ? b.u64[i] : a.u64[i + 1];
  }
  expect_bits("_mm512_unpacklo_epi64", vector(_mm512_unpacklo_epi64(a, b)), expected);
  expect_bits("_mm512_unpackhi_epi64", vector(_mm512_unpackhi_epi64(a, b)), upper);

  for (int i = 0; i < 8; ++i) {
    const int index = at.u64[i] & 15;
    expected.u64[i] = index < 8 ? a.u64[index] : b.u64[index - 8];
    upper.u64[i] = a.u64[i];
  }
  const __m512d permuted = _mm512_permutex2var_pd(a.as<__m512d>(), at, b.as<__m512d>());
  expect_bits("_mm512_permutex2var_pd", vector(permuted), expected);
  const auto word = [&](int i) { return static_cast<int64_t>(a.u64[i]); };
  const __m512i set = _mm512_setr_epi64(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
  expect_bits("_mm512_setr_epi64", vector(set), upper);
  for (int i = 0; i < 32; ++i) {
    const int index = at.u16[i] & 63;
    expected.u16[i] = index < 32 ? a.u16[index] : b.u16[index - 32];
    upper.u16[i] = a.u16[at.u16[i] & 31];
  }
  expect_bits("_mm512_permutex2var_epi16", vector(_mm512_permutex2var_epi16(a, at, b)), expected);
  expect_bits("_mm512_permutexvar_epi16", vector(_mm512_permutexvar_epi16(at, a)), upper);
}

}  // namespace

int main() {
  for (int round = 0; round < 2000; ++round) {
    conversions();
    arithmetic();
    moves();
  }
  std::printf("%d compared, %d wrong\n", compared, wrong);
  return wrong != 0;
}
