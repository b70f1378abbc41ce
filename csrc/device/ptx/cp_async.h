// cp.async: copies from global to shared memory that bypass registers (sm_80).
#pragma once

#include <cstdint>

namespace mha_ext::ptx {

// Copies source_bytes and fills the rest of kBytes with zeros; both addresses are multiples of kBytes.
// With source_bytes = 0 nothing is read and the source may be any address.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t shared, const void* global, int source_bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (kBytes == 16) {  // .cg: cached in L2 only
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
                 "r"(source_bytes)
                 : "memory");
  }
}

// Closes the group of this thread's copies since the last commit; a group may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread are still on their way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  static_assert(kPending >= 0);
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mha_ext::ptx
