// Vector stores to global memory that the compiler cannot split.
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

__device__ __forceinline__ void st_global(void* global, const uint2& words) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(words.x), "r"(words.y) : "memory");
}

__device__ __forceinline__ void st_global(void* global, const uint4& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace mha_ext::ptx
