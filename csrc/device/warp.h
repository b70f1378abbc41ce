// Reductions over a quad, a warp, or all warps of a block.
#pragma once

namespace mha_ext {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Every lane gets the combination of all 32 values.
template <typename T, typename Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The same over kWarps warps, which are the whole block where there is more than one. scratch: one value per warp.
template <int kWarps, typename T, typename Combine>
__device__ __forceinline__ T group_reduce(T value, T* scratch, Combine combine) {
  value = warp_reduce(value, combine);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) value = combine(value, scratch[warp]);
    __syncthreads();  // scratch may be written again
  }
  return value;
}

template <int kWarps, typename T>
__device__ __forceinline__ T group_sum(T value, T* scratch) {
  return group_reduce<kWarps>(value, scratch, [](T a, T b) { return a + b; });
}

// Over the four lanes that hold a row of an mma accumulator.
template <typename Combine>
__device__ __forceinline__ float quad_reduce(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(kAllLanes, x, 1));
  return combine(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ __forceinline__ float quad_max(float x) {
  return quad_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ float quad_sum(float x) {
  return quad_reduce(x, [](float a, float b) { return a + b; });
}

}  // namespace mha_ext
