// mbarrier and bulk copies.
#include <cstdint>

namespace {
__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ void init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ void expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ void wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n.reg .pred P;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra "
      "AGAIN;\nDONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
struct alignas(64) Map {
  char bytes[128];
};
}  // namespace

extern "C" {

// One warp fills, one drains, over a ring of two stages.
__global__ void ring(const float* in, float* out, int tiles) {
  __shared__ float stage[2][32];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init(shared_address(&full[i]), 32), init(shared_address(&empty[i]), 32);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < tiles; ++t) {
    const int s = t % 2, parity = t / 2 % 2;
    if (threadIdx.x < 32) {
      wait(shared_address(&empty[s]), parity ^ 1);
      stage[s][lane] = in[t * 32 + lane];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&full[s])) : "memory");
    } else {
      wait(shared_address(&full[s]), parity);
      out[t * 32 + lane] = stage[s][31 - lane];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[s])) : "memory");
    }
  }
}

// As ring, but the producer does not wait until a stage is empty.
__global__ void ring_broken(const float* in, float* out, int tiles) {
  __shared__ float stage[2][32];
  __shared__ alignas(8) uint64_t full[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init(shared_address(&full[i]), 32);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < tiles; ++t) {
    const int s = t % 2, parity = t / 2 % 2;
    if (threadIdx.x < 32) {
      stage[s][lane] = in[t * 32 + lane];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&full[s])) : "memory");
    } else {
      wait(shared_address(&full[s]), parity);
      out[t * 32 + lane] = stage[s][31 - lane];
    }
  }
}

__global__ void bulk_copy(const float* in, float* out) {
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0) {
    init(shared_address(&bar), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(shared_address(&bar), 1024);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(
                     shared_address(tile)),
                 "l"(in), "r"(shared_address(&bar))
                 : "memory");
  }
  wait(shared_address(&bar), 0);
  for (int i = threadIdx.x; i < 256; i += blockDim.x) tile[i] = tile[i] * 2;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(out), "r"(shared_address(tile))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

__global__ void bulk_copy_broken(const float* in, float* out) {  // does not wait
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0) init(shared_address(&bar), 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(shared_address(&bar), 1024);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(
                     shared_address(tile)),
                 "l"(in), "r"(shared_address(&bar))
                 : "memory");
  }
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
  wait(shared_address(&bar), 0);
}

// A tile of a matrix into shared memory, its raw bytes out, and the tile back into another matrix.
__global__ void tensor_copy(const __grid_constant__ Map from, const __grid_constant__ Map to, uint32_t* raw, int x,
                            int y, int bytes) {
  extern __shared__ __align__(1024) uint32_t tile[];
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0) {
    init(shared_address(&bar), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    expect(shared_address(&bar), bytes);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(tile)),
        "l"(&from), "r"(x), "r"(y), "r"(shared_address(&bar))
        : "memory");
  }
  __syncthreads();
  wait(shared_address(&bar), 0);
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) raw[i] = tile[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&to),
                 "r"(shared_address(tile)), "r"(x), "r"(y)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}

}  // extern "C"
