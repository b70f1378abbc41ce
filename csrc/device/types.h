// Element types: what a tensor holds, what a kernel computes in, and loads by a run-time dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/ptx/st_global.h"
#include "params.h"

namespace mha_ext {

// fp16, bf16 and fp32 accumulate in fp32, fp64 in fp64.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From>
__device__ __forceinline__ To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, __half>) {
    return static_cast<To>(__half2float(x));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(x));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

// Two neighbours in one register, the first in its lower half.
template <typename Element>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  uint32_t word;
  if constexpr (std::is_same_v<Element, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

// Neighbouring elements that are read and written as one access of up to 16 bytes.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  T at[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* source) {
  return *reinterpret_cast<const Pack<T, kCount>*>(source);
}

// To global memory. (An assignment may be split by the compiler into stores of single elements.)
template <typename T, int kCount>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, kCount>& pack) {
  if constexpr (sizeof(pack) % 16 == 0) {
    uint4 words[sizeof(pack) / 16];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(pack) / 16); ++i) {
      ptx::st_global(reinterpret_cast<uint4*>(target) + i, words[i]);
    }
  } else if constexpr (sizeof(pack) == 8) {
    uint2 words;
    memcpy(&words, &pack, sizeof(pack));
    ptx::st_global(target, words);
  } else {
    *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
  }
}

// Stores neighbours, of which `inside` lie in c: at once where c is aligned and all do.
template <typename Out, int kCount>
__device__ __forceinline__ void store_outputs(Out* c, const Pack<Out, kCount>& out, int64_t inside, bool aligned) {
  if (aligned && inside >= kCount) {
    store_pack(c, out);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < inside) c[i] = out.at[i];
    }
  }
}

constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 2;
    case DType::kBFloat16: return 2;
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBool: return 1;
  }
  return 0;
}

// Whether packs of `count` elements can be read from an address and from steps of these strides beyond it.
template <typename... Stride>
bool packs_align(const void* base, DType dtype, int64_t count, Stride... strides) {
  const int64_t bytes = count * size_of(dtype) < 16 ? count * size_of(dtype) : 16;
  const bool aligned_base = reinterpret_cast<uintptr_t>(base) % static_cast<uintptr_t>(bytes) == 0;
  return aligned_base && ((strides * size_of(dtype) % bytes == 0) && ...);
}

}  // namespace mha_ext
