// mbarrier, bulk copies, and all of it together with wgmma.
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

// C = A B': A is 64 x K, B 32 x K, both row-major halves; C is 64 x 32 floats. One warp loads tiles of 64 columns by
// tensor maps into two stages, a warpgroup multiplies, and C leaves by a tensor map.
__device__ void load_tile(void* to, const Map& map, int x, uint64_t& bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(x), "r"(0), "r"(shared_address(&bar))
      : "memory");
}
__device__ uint64_t descriptor(const void* p) {  // K-major, 128-byte swizzle
  return (shared_address(p) & 0x3ffff) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}
__device__ void multiply(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, "
      "%5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b)
      : "memory");
}
// Everything nvcc knows of the accumulators before is before, and after is after.
__device__ void pin(float (&d)[16]) {
  for (float& v : d) asm volatile("" : "+f"(v)::"memory");
}
__global__ void __launch_bounds__(160)
    gemm(const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map c, int k) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* const a_stage[2] = {shared, shared + 8192};
  uint8_t* const b_stage[2] = {shared + 16384, shared + 20480};
  float* const c_tile = reinterpret_cast<float*>(shared + 24576);
  __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init(shared_address(&full[i]), 1), init(shared_address(&empty[i]), 128);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x > 128) return;
#pragma unroll 1
    for (int t = 0; t < k / 64; ++t) {
      wait(shared_address(&empty[t % 2]), t / 2 % 2 ^ 1);
      expect(shared_address(&full[t % 2]), 12288);
      load_tile(a_stage[t % 2], a, t * 64, full[t % 2]);
      load_tile(b_stage[t % 2], b, t * 64, full[t % 2]);
    }
    return;
  }
  float d[16] = {};
#pragma unroll 1
  for (int t = 0; t < k / 64; ++t) {
    wait(shared_address(&full[t % 2]), t / 2 % 2);
    pin(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int i = 0; i < 4; ++i) multiply(d, descriptor(a_stage[t % 2]) + 2 * i, descriptor(b_stage[t % 2]) + 2 * i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(d);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[t % 2])) : "memory");
  }
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int v = 0; v < 16; ++v) c_tile[(row + 8 * (v >> 1 & 1)) * 32 + 8 * (v >> 2) + col + (v & 1)] = d[v];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %2}], [%1];" ::"l"(&c),
                 "r"(shared_address(c_tile)), "r"(0)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

}  // extern "C"
