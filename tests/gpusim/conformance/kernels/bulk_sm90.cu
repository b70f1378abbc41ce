// Bulk copies and reductions of contiguous bytes.
#include "async_sm90.cuh"

extern "C" __global__ void bulk_load(const uint8_t* in, uint8_t* out, b32 bytes) {
  uint8_t* tile = aligned_shared();
  __shared__ b64 place;
  const b32 barrier = shared_address(&place);
  if (threadIdx.x == 0) {
    init_for_copies(barrier, 1);
    arrive_expect(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(tile)),
                 "l"(in), "r"(bytes), "r"(barrier)
                 : "memory");
  }
  __syncthreads();
  wait(barrier, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = tile[i];
}

__device__ void fill(uint8_t* tile, const uint8_t* in, b32 bytes) {
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = in[i];
  to_async_proxy();
  __syncthreads();
}

extern "C" __global__ void bulk_store(const uint8_t* in, uint8_t* out, b32 bytes) {
  uint8_t* tile = aligned_shared();
  fill(tile, in, bytes);
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(shared_address(tile)),
                 "r"(bytes)
                 : "memory");
    commit_and_wait();
  }
}

// After wait_group.read the source may be written again: what was there before is what arrives.
extern "C" __global__ void bulk_store_read(const uint8_t* in, uint8_t* out, b32 bytes) {
  uint8_t* tile = aligned_shared();
  fill(tile, in, bytes);
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(shared_address(tile)),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = 0xEE;
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#define REDUCE(name, op)                                                                                   \
  extern "C" __global__ void bulk_##name(const uint8_t* in, uint8_t* out, b32 bytes) {                     \
    uint8_t* tile = aligned_shared();                                                                      \
    fill(tile, in, bytes);                                                                                 \
    if (threadIdx.x == 0) {                                                                                \
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." op " [%0], [%1], %2;" ::"l"(out), \
                   "r"(shared_address(tile)), "r"(bytes)                                                   \
                   : "memory");                                                                            \
      commit_and_wait();                                                                                   \
    }                                                                                                      \
  }
REDUCE(add_f32, "add.f32")
REDUCE(add_f64, "add.f64")
REDUCE(add_noftz_f16, "add.noftz.f16")
REDUCE(add_noftz_bf16, "add.noftz.bf16")
REDUCE(add_u32, "add.u32")
REDUCE(add_u64, "add.u64")
REDUCE(min_s32, "min.s32")
REDUCE(max_u32, "max.u32")
REDUCE(and_b32, "and.b32")
REDUCE(xor_b64, "xor.b64")
