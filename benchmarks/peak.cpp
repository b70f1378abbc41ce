// What this processor can do at most: products in registers, and reads of given memory, on a number of threads.
// Compiled by peak.py for the machine it runs on, with OpenMP, whose threads are the ones torch uses.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));

constexpr int kChains = 12;  // independent sums, each its own variable: an array of them would lie in memory

// step(sum) is one instruction, which may wait for the sum's last one but for no other's.
template <class Vector, class Step>
inline Vector chains(int64_t steps, Vector start, Step step) {
  Vector a = start, b = a + 1, c = b + 1, d = c + 1, e = d + 1, f = e + 1;
  Vector g = f + 1, h = g + 1, i = h + 1, j = i + 1, k = j + 1, l = k + 1;
  for (int64_t s = 0; s < steps; ++s) {
    a = step(a), b = step(b), c = step(c), d = step(d), e = step(e), f = step(f);
    g = step(g), h = step(h), i = step(i), j = step(j), k = step(k), l = step(l);
  }
  return ((a + b) + (c + d)) + ((e + f) + (g + h)) + ((i + j) + (k + l));
}

// Volatile: from known numbers a compiler would work out a sum that does not change, and leave its chain out.
volatile float known_factor = 0.999f, known_summand = 1e-3f, kept;

float multiply_add(int64_t steps) {
  const Floats factor = known_factor - Floats{}, summand = known_summand - Floats{};
  return chains(steps, Floats{}, [&](Floats sum) { return sum * factor + summand; })[0];
}

uint64_t sum_of_words(const char* begin, int64_t count) {  // any alignment; fewer than 8 bytes at the end are left out
  const char *p = begin, *end = begin + count * 8;
  const auto load = [](const char* from) {
    Words value;
    std::memcpy(&value, from, kVectorBytes);
    return value;
  };
  Words a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  for (; end - p >= 8 * kVectorBytes; p += 8 * kVectorBytes) {
    a += load(p), b += load(p + kVectorBytes), c += load(p + 2 * kVectorBytes), d += load(p + 3 * kVectorBytes);
    e += load(p + 4 * kVectorBytes), f += load(p + 5 * kVectorBytes), g += load(p + 6 * kVectorBytes);
    h += load(p + 7 * kVectorBytes);
  }
  const Words all = ((a + b) + (c + d)) + ((e + f) + (g + h));
  uint64_t sum = 0;
  for (int lane = 0; lane < kVectorBytes / 8; ++lane) sum += all[lane];
  for (uint64_t word; p < end; p += 8) std::memcpy(&word, p, 8), sum += word;
  return sum;
}

}  // namespace

extern "C" {

int multiply_add_flops_per_step() { return kChains * kVectorBytes / 4 * 2; }

void run_multiply_add(int64_t steps, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) kept = multiply_add(steps);
}

// Two products of bf16 and a sum in fp32 a lane; 0 where the processor has no such instruction.
int bf16_dot_flops_per_step() {
#if defined(__AVX512BF16__)
  return kChains * 16 * 4;
#else
  return 0;
#endif
}

void run_bf16_dot([[maybe_unused]] int64_t steps, [[maybe_unused]] int threads) {
#if defined(__AVX512BF16__)
#pragma omp parallel for num_threads(threads)
  for (int thread = 0; thread < threads; ++thread) {
    const __m512bh pairs = (__m512bh)_mm512_set1_epi32(0x3f803f80);  // ones
    const auto dot = [&](Floats sum) { return (Floats)_mm512_dpbf16_ps((__m512)sum, pairs, pairs); };
    kept = chains(steps, Floats{}, dot)[0];
  }
#endif
}

// The sum of `count` words of 8 bytes, each thread its own stretch of them.
int64_t read_words(const char* begin, int64_t count, int threads) {
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t from = count * thread / threads, to = count * (thread + 1) / threads;
    sum += sum_of_words(begin + 8 * from, to - from);
  }
  return static_cast<int64_t>(sum);
}

}  // extern "C"
