// Named barriers: a part of a block waits for itself.
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

// kThreads threads, whole warps, meet at barrier 1 .. 15 (0 is __syncthreads).
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int barrier) {
  static_assert(kThreads % 32 == 0, "barriers count warps");
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The same, and whether one of them says yes.
template <int kThreads>
__device__ __forceinline__ bool barrier_or(int barrier, bool yes) {
  static_assert(kThreads % 32 == 0, "barriers count warps");
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q;}"
               : "=r"(any)
               : "r"(barrier), "n"(kThreads), "r"(static_cast<int>(yes))
               : "memory");
  return any;
}

}  // namespace mha_ext::ptx
