// Words in global memory by which blocks wait for each other.
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

// Whoever sees what st_release wrote also sees all that its thread wrote or knew of before.
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void st_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

}  // namespace mha_ext::ptx
