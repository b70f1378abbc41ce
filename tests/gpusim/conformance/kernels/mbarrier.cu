// mbarriers, as sm_80 has them.
#include "async.cuh"

// One thread, and what it sees at every step.
extern "C" __global__ void phases(b32* log) {
  __shared__ b64 place;
  const b32 barrier = shared_address(&place);
  init(barrier, 3);
  *log++ = test_parity(barrier, 1);  // a fresh barrier: the phase before is over
  *log++ = test_parity(barrier, 0);
  const b64 first = arrive(barrier);
  *log++ = pending(first);
  *log++ = test(barrier, first);
  const b64 second = arrive(barrier);
  *log++ = pending(second);
  *log++ = test_parity(barrier, 0);
  arrive(barrier);  // phase 0 is over
  *log++ = test(barrier, first);
  *log++ = test(barrier, second);
  *log++ = test_parity(barrier, 0);
  *log++ = test_parity(barrier, 1);
  const b64 third = arrive_drop(barrier);  // phase 1: from the next on, two are expected
  *log++ = pending(third);
  b64 fourth;
  asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;" : "=l"(fourth) : "r"(barrier) : "memory");
  *log++ = pending(fourth);
  *log++ = test(barrier, third);
  arrive(barrier);
  *log++ = test(barrier, third);
  *log++ = test_parity(barrier, 1);
  const b64 fifth = arrive(barrier);  // phase 2
  *log++ = pending(fifth);
  *log++ = test_parity(barrier, 0);
  arrive(barrier);
  *log++ = test(barrier, fifth);
  *log++ = test_parity(barrier, 0);
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four warps hand a row on, phase after phase: each thread arrives, waits, and reads what another warp wrote.
extern "C" __global__ void rounds(const b32* in, b32* out, int count) {
  __shared__ b32 row[2][128];
  __shared__ b64 place;
  const b32 barrier = shared_address(&place);
  if (threadIdx.x == 0) init(barrier, 128);
  __syncthreads();
  b32 value = in[threadIdx.x];
  for (int i = 0; i < count; ++i) {
    row[i % 2][threadIdx.x] = value;
    const b64 state = arrive(barrier);
    wait_for([&] { return test(barrier, state); });
    value = row[i % 2][(threadIdx.x + 33) % 128] + i;
  }
  out[threadIdx.x] = value;
}

// cp.async whose end is an arrival: .noinc is one of those expected, without it one more is expected for it.
#define COPY_ARRIVES(name, suffix, expected, thread_arrives)                                            \
  extern "C" __global__ void name(const uint4* in, uint4* out) {                                        \
    __shared__ uint4 tile[64];                                                                          \
    __shared__ b64 place;                                                                               \
    const b32 barrier = shared_address(&place);                                                         \
    if (threadIdx.x == 0) init(barrier, expected);                                                      \
    __syncthreads();                                                                                    \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile + threadIdx.x)), \
                 "l"(in + threadIdx.x)                                                                  \
                 : "memory");                                                                           \
    asm volatile("cp.async.mbarrier.arrive" suffix ".shared.b64 [%0];" ::"r"(barrier) : "memory");      \
    if (thread_arrives) arrive(barrier);                                                                \
    wait_for([&] { return test_parity(barrier, 0); });                                                  \
    out[threadIdx.x] = tile[63 - threadIdx.x];                                                          \
  }
COPY_ARRIVES(copy_arrives_noinc, ".noinc", 64, false)
COPY_ARRIVES(copy_and_thread_arrive, ".noinc", 128, true)
COPY_ARRIVES(copy_arrives, "", 64, true)
