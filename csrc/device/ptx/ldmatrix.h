// Shared memory to mma fragments.
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

// Four 8x8 matrices of 16-bit elements; lane l names the address of row l % 8 of matrix l / 8, 16-byte aligned.
// Without kTranspose a row may also be four 32-bit elements.
template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&regs)[4], uint32_t shared) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
                 : "r"(shared));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
                 : "r"(shared));
  }
}

// One 32-bit word, for what ldmatrix cannot transpose.
__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t shared) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

// Four neighbouring words, 16-byte aligned.
__device__ __forceinline__ void ld_shared_v4(float (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(words[0]), "=f"(words[1]), "=f"(words[2]), "=f"(words[3])
               : "r"(shared));
}

__device__ __forceinline__ void st_shared_b32(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// No instruction: keeps an address in its register, which the compiler would otherwise work out again in every loop.
__device__ __forceinline__ void keep(uint32_t& address) { asm volatile("" : "+r"(address)); }
__device__ __forceinline__ void keep(const char*& address) { asm volatile("" : "+l"(address)); }

}  // namespace mha_ext::ptx
