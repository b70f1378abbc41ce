// Words in global memory by which blocks wait for each other.
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

__device__ __forceinline__ uint32_t ld_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Whoever sees what st_release wrote also sees all that its thread wrote or knew of before.
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void st_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Waits until st_release writes `value`, which then stays. An ld_acquire throws away L1, so only the last look is one.
__device__ __forceinline__ void wait_acquire(const uint32_t* word, uint32_t value) {
  constexpr unsigned kLongestPause = 256;  // nanoseconds, a trip to L2 and back
  for (unsigned pause = 16; ld_relaxed(word) != value; pause = pause < kLongestPause ? 2 * pause : pause) {
    __nanosleep(pause);
  }
  ld_acquire(word);
}

}  // namespace mha_ext::ptx
