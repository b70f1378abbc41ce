// mbarriers, in one instruction a function.
#pragma once
#include "form.cuh"

__device__ inline void init(b32 barrier, b32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline b64 arrive(b32 barrier) {
  b64 state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
  return state;
}
__device__ inline b64 arrive_drop(b32 barrier) {
  b64 state;
  asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
  return state;
}
__device__ inline b32 test(b32 barrier, b64 state) {
  b32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "l"(state)
               : "memory");
  return done;
}
__device__ inline b32 pending(b64 state) {
  b32 count;
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
  return count;
}
__device__ inline b32 test_parity(b32 barrier, b32 parity) {
  b32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

// Waits until the phase of that parity is over. A barrier that never gets there is a fault, not a hang.
template <class Try>
__device__ void wait_for(Try done) {
  for (int tries = 0; tries < 1 << 22; ++tries) {
    if (done()) return;
  }
  __trap();
}
