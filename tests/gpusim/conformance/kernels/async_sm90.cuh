// mbarriers and bulk copies as sm_90 adds to them.
#pragma once
#include "async.cuh"

__device__ inline void init_for_copies(b32 barrier, b32 count) {
  init(barrier, count);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline b64 arrive_expect(b32 barrier, b32 bytes) {
  b64 state;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state)
               : "r"(barrier), "r"(bytes)
               : "memory");
  return state;
}
__device__ inline b32 try_parity(b32 barrier, b32 parity) {
  b32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
__device__ inline void wait(b32 barrier, b32 parity) {
  wait_for([&] { return try_parity(barrier, parity); });
}
__device__ inline void to_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void commit_and_wait() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

// The first multiple of 1024 in dynamic shared memory: where every swizzle's pattern begins.
__device__ inline uint8_t* aligned_shared() {
  extern __shared__ uint8_t raw[];
  return raw + (-shared_address(raw) & 1023);
}
