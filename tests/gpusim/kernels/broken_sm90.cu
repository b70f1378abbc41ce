// Pairs of kernels, as in broken.cu, about what sm_90 adds: mbarrier, bulk copies, wgmma. Blocks of 128 threads, 256
// where the name begins with `registers`.
#include <cstdint>

namespace {

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

#define INSTRUCTION(name, text) \
  __device__ void name() { asm volatile(text::: "memory"); }
INSTRUCTION(fence_init, "fence.mbarrier_init.release.cluster;")
INSTRUCTION(fence_proxy, "fence.proxy.async.shared::cta;")
INSTRUCTION(bulk_commit, "cp.async.bulk.commit_group;")
INSTRUCTION(bulk_wait, "cp.async.bulk.wait_group.read 0;")
INSTRUCTION(wgmma_fence, "wgmma.fence.sync.aligned;")
INSTRUCTION(wgmma_commit, "wgmma.commit_group.sync.aligned;")
INSTRUCTION(wgmma_wait, "wgmma.wait_group.sync.aligned 0;")
INSTRUCTION(wgmma_wait_one, "wgmma.wait_group.sync.aligned 1;")
INSTRUCTION(wait_copies, "cp.async.wait_all;")
INSTRUCTION(cluster_arrive, "barrier.cluster.arrive.aligned;")
INSTRUCTION(cluster_relaxed, "barrier.cluster.arrive.relaxed.aligned;")
INSTRUCTION(cluster_wait, "barrier.cluster.wait.aligned;")

__device__ void init(uint64_t& bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(count) : "memory");
}
__device__ void invalidate(uint64_t& bar) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&bar)) : "memory");
}
__device__ uint64_t arrive(uint64_t& bar) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(shared_address(&bar)) : "memory");
  return state;
}
__device__ void expect(uint64_t& bar, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(bytes)
               : "memory");
}
__device__ void arrive_expect(uint64_t& bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&bar)), "r"(bytes)
               : "memory");
}
__device__ void wait(uint64_t& bar, int parity) {
  asm volatile(
      "{\n.reg .pred P;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra "
      "AGAIN;\nDONE:\n}" ::"r"(shared_address(&bar)),
      "r"(parity)
      : "memory");
}
__device__ void wait_state(uint64_t& bar, uint64_t state) {
  asm volatile(
      "{\n.reg .pred P;\nAGAIN:\nmbarrier.try_wait.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra "
      "AGAIN;\nDONE:\n}" ::"r"(shared_address(&bar)),
      "l"(state)
      : "memory");
}

__device__ void bulk_load(void* to, const void* from, int bytes, uint64_t& bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&bar))
               : "memory");
}
__device__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
  bulk_commit();
}
__device__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Operands of wgmma without swizzle: A is 64 x 16 halves, B 8 (or 16) x 16.
struct alignas(128) Operands {
  uint32_t a[512], b[128];
};
__device__ uint64_t descriptor(const void* p, int leading) {
  return (shared_address(p) & 0x3ffff) >> 4 | static_cast<uint64_t>(leading) >> 4 << 16 | 256ull >> 4 << 32;
}
struct Accumulators {
  float v[4] = {};
};
__device__ void wgmma(Accumulators& d, const Operands& s) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, "
      "%5, p, 1, 1, 0, 0;\n}"
      : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
      : "l"(descriptor(s.a, 128)), "l"(descriptor(s.b, 128))
      : "memory");
}
// The same accumulators as packed halves: another shape.
__device__ void wgmma_half(Accumulators& d, const Operands& s) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n.reg .b32 x, y, z, w;\nmov.b32 x, %0;\nmov.b32 y, %1;\nmov.b32 z, %2;\n"
      "mov.b32 w, %3;\nwgmma.mma_async.sync.aligned.m64n16k16.f16.f16.f16 {x, y, z, w}, %4, %5, p, 1, 1, 0, 0;\n"
      "mov.b32 %0, x;\nmov.b32 %1, y;\nmov.b32 %2, z;\nmov.b32 %3, w;\n}"
      : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
      : "l"(descriptor(s.a, 128)), "l"(descriptor(s.b, 128))
      : "memory");
}
__device__ void wgmma(Accumulators& d, uint32_t (&a)[4], const Operands& s) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, %8, p, 1, 1, 0;\n}"
      : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(s.b, 128))
      : "memory");
}
__device__ void pin(Accumulators& d) {
  asm volatile("" : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])::"memory");
}
__device__ void fill(Operands& s, const float* a) {
  for (int i = threadIdx.x; i < 512; i += 128) s.a[i] = static_cast<uint32_t>(a[i % 64]);
  s.b[threadIdx.x] = static_cast<uint32_t>(a[threadIdx.x % 64]);
}
__device__ void ready(Operands& s, const float* a) {
  fill(s, a);
  fence_proxy();
  __syncthreads();
}
__device__ void put(float* b, const Accumulators& d) {
  if (threadIdx.x < 64) b[threadIdx.x] = d.v[0] + d.v[1] + d.v[2] + d.v[3];
}

}  // namespace

extern "C" {

// ---- proxy fences ----

// stores, then a bulk store of what they wrote
__global__ void proxy_store_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}
__global__ void proxy_store_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}

// the fence is there, but only in the thread that issues, which wrote a part
__global__ void proxy_issuer_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) fence_proxy(), bulk_store(b, tile, 256), bulk_wait();
}
__global__ void proxy_issuer_right(const float* a, float* b, int n) {  // it wrote all
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 64; ++i) tile[i] = a[i];
    fence_proxy(), bulk_store(b, tile, 256), bulk_wait();
  }
}

// the fence comes after the barrier that hands over
__global__ void proxy_order_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  fence_proxy();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}
__global__ void proxy_order_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  fence_proxy();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}

// stores, then wgmma
__global__ void proxy_wgmma_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  fill(s, a);
  __syncthreads();
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void proxy_wgmma_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}

// stores, then a bulk load over them
__global__ void proxy_load_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init();
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  const float sum = tile[(threadIdx.x + 1) % 64];
  __syncthreads();
  if (threadIdx.x == 0) arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = sum + tile[threadIdx.x];
}
__global__ void proxy_load_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init();
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  const float sum = tile[(threadIdx.x + 1) % 64];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = sum + tile[threadIdx.x];
}

// cp.async writes by the generic proxy too
__global__ void copy_fence_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 16) copy_async(tile + 4 * threadIdx.x, a + 4 * threadIdx.x);
  wait_copies();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}
__global__ void copy_fence_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 16) copy_async(tile + 4 * threadIdx.x, a + 4 * threadIdx.x);
  wait_copies();
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}

// ---- mbarrier ----

__global__ void init_fence_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1);
  __syncthreads();
  if (threadIdx.x == 0) arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x];
}
__global__ void init_fence_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init();
  __syncthreads();
  if (threadIdx.x == 0) arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x];
}

// the fence is that of another thread
__global__ void init_thread_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1);
  __syncthreads();
  if (threadIdx.x == 32) fence_init(), arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x];
}
__global__ void init_thread_right(const float* a, float* b, int n) {  // a proxy fence does as well
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_proxy();
  __syncthreads();
  if (threadIdx.x == 32) arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x];
}

// no barrier between the initialisation and its use
__global__ void init_order_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 128);
  arrive(bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void init_order_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 128);
  __syncthreads();
  arrive(bar);
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// one arrival more than a phase has room for
__global__ void arrivals_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 64), expect(bar, 16);
  __syncthreads();
  if (threadIdx.x < 65) arrive(bar);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void arrivals_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 64), expect(bar, 16);
  __syncthreads();
  if (threadIdx.x < 64) arrive(bar);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// more bytes announced than a phase can count
__global__ void bytes_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), expect(bar, 1 << 19), expect(bar, 1 << 19);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void bytes_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), expect(bar, 1 << 19), expect(bar, (1 << 19) - 1);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

__global__ void no_init_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar[2];
  if (threadIdx.x == 0) init(bar[0], 1), arrive(bar[1]);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void no_init_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar[2];
  if (threadIdx.x == 0) init(bar[0], 1), arrive(bar[0]);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

__global__ void invalidated_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), arrive(bar), invalidate(bar), arrive(bar);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void invalidated_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), arrive(bar), invalidate(bar), init(bar, 1), arrive(bar);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

__global__ void init_again_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), arrive(bar), init(bar, 2);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void init_again_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), arrive(bar), invalidate(bar), init(bar, 2);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// a phase that cannot come: nobody arrives a second time
__global__ void phase_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 128);
  __syncthreads();
  arrive(bar);
  wait(bar, 0), wait(bar, 1);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void phase_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 128);
  __syncthreads();
  arrive(bar);
  wait(bar, 0);
  arrive(bar);
  wait(bar, 1);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// a phase long gone: its state says nothing any more
__global__ void old_phase_broken(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    init(bar, 1);
    const uint64_t first = arrive(bar);
    arrive(bar), wait_state(bar, first);
  }
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void old_phase_right(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    init(bar, 1);
    arrive(bar);
    const uint64_t second = arrive(bar);
    wait_state(bar, second);
  }
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// One lane arrives for its warp: what the others wrote, or read, it hands over after __syncwarp only.
#define ELECTED(name, between)                                      \
  __global__ void elected_##name(const float* a, float* b, int n) { \
    __shared__ float tile[32];                                      \
    __shared__ uint64_t full, empty;                                \
    if (threadIdx.x == 0) init(full, 1), init(empty, 1);            \
    __syncthreads();                                                \
    for (int i = 0; i < 2; ++i) {                                   \
      if (threadIdx.x < 32) {                                       \
        if (i > 0) wait(empty, 0);                                  \
        tile[threadIdx.x] = a[threadIdx.x] + i;                     \
        __syncwarp();                                               \
        if (threadIdx.x == 0) arrive(full);                         \
      } else if (threadIdx.x < 64) {                                \
        wait(full, i);                                              \
        b[threadIdx.x] = tile[threadIdx.x - 32];                    \
        between;                                                    \
        if (threadIdx.x == 32) arrive(empty);                       \
      }                                                             \
    }                                                               \
  }
ELECTED(broken, )
ELECTED(right, __syncwarp())

__global__ void elected_write_broken(const float* a, float* b, int n) {
  __shared__ float tile[32];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1);
  __syncthreads();
  if (threadIdx.x < 32) tile[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x == 0) arrive(bar);
  if (threadIdx.x >= 32) wait(bar, 0);
  if (threadIdx.x >= 32 && threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x - 32];
}
__global__ void elected_write_right(const float* a, float* b, int n) {  // every lane arrives for itself, in any order
  __shared__ float tile[32];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 32);
  __syncthreads();
  if (threadIdx.x < 32) tile[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x < 32 && threadIdx.x % 2) arrive(bar);
  if (threadIdx.x < 32 && threadIdx.x % 2 == 0) arrive(bar);
  if (threadIdx.x >= 32) wait(bar, 0);
  if (threadIdx.x >= 32 && threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x - 32];
}

// One lane refills what its whole warp has just read.
#define REFILL(name, between)                                                         \
  __global__ void refill_##name(const float* a, float* b, int n) {                    \
    __shared__ alignas(128) float tile[32];                                           \
    __shared__ uint64_t bar;                                                          \
    if (threadIdx.x == 0) init(bar, 1), fence_init();                                 \
    __syncthreads();                                                                  \
    if (threadIdx.x >= 32) return;                                                    \
    if (threadIdx.x == 0) arrive_expect(bar, 128), bulk_load(tile, a, 128, bar);      \
    wait(bar, 0);                                                                     \
    b[threadIdx.x] = tile[threadIdx.x];                                               \
    between;                                                                          \
    if (threadIdx.x == 0) arrive_expect(bar, 128), bulk_load(tile, a + 32, 128, bar); \
    wait(bar, 1);                                                                     \
    b[threadIdx.x + 32] = tile[threadIdx.x];                                          \
  }
REFILL(broken, )
REFILL(right, __syncwarp())

// ---- bulk copies ----

// The arrival hands over what its thread did before it; a copy that ends later hands over the copy alone.
__global__ void bulk_edge_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ float scale;
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init();
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_expect(bar, 256);
    scale = a[1];
    bulk_load(tile, a, 256, bar);
  }
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x] * scale;
}
__global__ void bulk_edge_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ float scale;
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init();
  __syncthreads();
  if (threadIdx.x == 0) {
    scale = a[1];
    arrive_expect(bar, 256);
    bulk_load(tile, a, 256, bar);
  }
  wait(bar, 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[threadIdx.x] * scale;
}

// Who waits for one barrier knows nothing of what copies wrote for another.
__global__ void bulk_other_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[2][64];
  __shared__ uint64_t bar[2];
  if (threadIdx.x == 0) init(bar[0], 1), init(bar[1], 1), fence_init();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) arrive_expect(bar[i], 256), bulk_load(tile[i], a, 256, bar[i]);
  }
  wait(bar[threadIdx.x / 64], 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[1][threadIdx.x];
}
__global__ void bulk_other_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[2][64];
  __shared__ uint64_t bar[2];
  if (threadIdx.x == 0) init(bar[0], 1), init(bar[1], 1), fence_init();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) arrive_expect(bar[i], 256), bulk_load(tile[i], a, 256, bar[i]);
  }
  wait(bar[threadIdx.x / 64], 0);
  if (threadIdx.x < 64) b[threadIdx.x] = tile[0][threadIdx.x];
}

// The same of cp.async whose end is the arrival.
#define COPY_EDGE(name, early, late)                                                                               \
  __global__ void name(const float* a, float* b, int n) {                                                          \
    __shared__ alignas(128) float tile[64];                                                                        \
    __shared__ float scale;                                                                                        \
    __shared__ uint64_t bar;                                                                                       \
    if (threadIdx.x == 0) init(bar, 32);                                                                           \
    __syncthreads();                                                                                               \
    if (threadIdx.x < 16) {                                                                                        \
      copy_async(tile + 4 * threadIdx.x, a + 4 * threadIdx.x);                                                     \
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&bar)) : "memory"); \
      early;                                                                                                       \
      arrive(bar);                                                                                                 \
      late;                                                                                                        \
    }                                                                                                              \
    wait(bar, 0);                                                                                                  \
    if (threadIdx.x >= 64) b[threadIdx.x - 64] = tile[threadIdx.x - 64] * scale;                                   \
  }
COPY_EDGE(copy_edge_broken, , if (threadIdx.x == 0) scale = a[1])
COPY_EDGE(copy_edge_right, if (threadIdx.x == 0) scale = a[1], )

// the source of a bulk store is overwritten while it is read
__global__ void bulk_source_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256);
  __syncthreads();
  if (threadIdx.x < 64) tile[threadIdx.x] = 0;
  if (threadIdx.x == 0) bulk_wait();
}
__global__ void bulk_source_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
  __syncthreads();
  if (threadIdx.x < 64) tile[threadIdx.x] = 0;
}

// the block ends, and its shared memory with it, while a bulk store reads
__global__ void bulk_exit_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256);
}
__global__ void bulk_exit_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_store(b, tile, 256), bulk_wait();
}

// ---- wgmma: registers ----

__global__ void wgmma_read_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit();
  put(b, d);
  wgmma_wait();
}
__global__ void wgmma_read_right(const float* a, float* b, int n) {  // two products, one group each
  __shared__ Operands s;
  Accumulators d, e;
  ready(s, a);
  pin(d), pin(e), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma(e, s), wgmma_commit();
  wgmma_wait_one(), pin(d);
  put(b, d);
  wgmma_wait(), pin(e);
  put(b, e);
}

__global__ void wgmma_write_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit();
  asm volatile("{\n.reg .f32 z;\nmov.f32 z, 0f00000000;\nadd.f32 %0, z, %0;\n}" : "+f"(d.v[1]));
  wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_write_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit();
  wgmma_wait(), pin(d);
  asm volatile("{\n.reg .f32 z;\nmov.f32 z, 0f00000000;\nadd.f32 %0, z, %0;\n}" : "+f"(d.v[1]));
  put(b, d);
}

// Copies of accumulators in flight are no accesses: products into one accumulator follow each other, and inline asm
// makes nvcc move it.
__global__ void wgmma_move_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence();
  for (int i = 0; i < 4; ++i) {
    wgmma(d, s);
    if (i == 1) d.v[0] += 1, pin(d);
  }
  wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_move_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence();
  for (int i = 0; i < 4; ++i) wgmma(d, s);
  wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}

// the wait leaves one group in flight
__global__ void wgmma_groups_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait_one(), pin(d);
  put(b, d);
}
__global__ void wgmma_groups_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  Accumulators e;
  pin(d), pin(e), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma(e, s), wgmma_commit(), wgmma_wait_one(), pin(d);
  put(b, d);
  wgmma_wait(), pin(e);
}

// a product in no group is waited for by nobody
__global__ void wgmma_commit_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_commit_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}

__global__ void wgmma_fence_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_fence_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}

// accumulators rescaled between two products, as in attention
__global__ void wgmma_rescale_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  for (float& v : d.v) v *= 0.5f;
  pin(d), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_rescale_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  for (float& v : d.v) v *= 0.5f;
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}

// accumulators of one shape, then of another
__global__ void wgmma_shape_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  pin(d), wgmma_fence(), wgmma(d, s), wgmma_half(d, s), wgmma_commit(), wgmma_wait(), pin(d);
  put(b, d);
}
__global__ void wgmma_shape_right(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  ready(s, a);
  Accumulators e;
  pin(d), pin(e), wgmma_fence(), wgmma(d, s), wgmma_half(e, s), wgmma_commit(), wgmma_wait(), pin(d), pin(e);
  put(b, d), put(b, e);
}

// A from registers, written while it is read
__global__ void wgmma_fragment_broken(const float* a, float* b, int n) {
  __shared__ Operands s;
  Accumulators d;
  uint32_t f[4] = {1, 2, 3, 4};
  ready(s, a);
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 x, y, z, w;\nmov.b32 x, %4;\nmov.b32 y, %5;\nmov.b32 z, %6;\nmov.b32 w, %7;\n"
      "setp.eq.u32 p, 0, 0;\nwgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, {x, y, z, w}, %8, p, 1, 1, 0;\nwgmma.commit_group.sync.aligned;\nadd.u32 x, x, 1;\n"
      "wgmma.wait_group.sync.aligned 0;\n}"
      : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
      : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(descriptor(s.b, 128))
      : "memory");
  put(b, d);
}
__global__ void wgmma_fragment_right(const float* a, float* b, int n) {  // read by others it may be
  __shared__ Operands s;
  Accumulators d;
  uint32_t f[4] = {1, 2, 3, 4 + threadIdx.x};
  ready(s, a);
  asm volatile("" : "+r"(f[0]), "+r"(f[1]), "+r"(f[2]), "+r"(f[3]));
  pin(d), wgmma_fence(), wgmma(d, f, s), wgmma_commit();
  if (threadIdx.x < 64) b[threadIdx.x] = f[3];
  wgmma_wait(), pin(d);
  put(b, d);
}

// ---- wgmma: shared memory, overwritten before the wait ----

#define OVERWRITE(name, early, late)                               \
  __global__ void name##_broken(const float* a, float* b, int n) { \
    __shared__ Operands s;                                         \
    __shared__ uint64_t bar;                                       \
    Accumulators d;                                                \
    if (threadIdx.x == 0) init(bar, 1), fence_init();              \
    ready(s, a);                                                   \
    pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit();            \
    __syncthreads();                                               \
    early;                                                         \
    wgmma_wait(), pin(d);                                          \
    late;                                                          \
    put(b, d);                                                     \
  }                                                                \
  __global__ void name##_right(const float* a, float* b, int n) {  \
    __shared__ Operands s;                                         \
    __shared__ uint64_t bar;                                       \
    Accumulators d;                                                \
    if (threadIdx.x == 0) init(bar, 1), fence_init();              \
    ready(s, a);                                                   \
    pin(d), wgmma_fence(), wgmma(d, s), wgmma_commit();            \
    wgmma_wait(), pin(d);                                          \
    __syncthreads();                                               \
    early;                                                         \
    late;                                                          \
    put(b, d);                                                     \
  }
OVERWRITE(wgmma_store, s.a[threadIdx.x] = 0, )
OVERWRITE(wgmma_copy, if (threadIdx.x < 16) copy_async(s.a + 4 * threadIdx.x, a + 4 * threadIdx.x), wait_copies())
OVERWRITE(wgmma_bulk, if (threadIdx.x == 0)(arrive_expect(bar, 256), bulk_load(s.a, a, 256, bar)), wait(bar, 0))

// ---- setmaxnreg: 128 registers a thread at the start, two warpgroups ----

#define REGISTERS(name, first, second)                                              \
  __global__ void __launch_bounds__(256, 2) name(const float* a, float* b, int n) { \
    if (threadIdx.x < 128)                                                          \
      asm volatile("setmaxnreg." first ";");                                        \
    else                                                                            \
      asm volatile("setmaxnreg." second ";");                                       \
    if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];                          \
  }
REGISTERS(registers_pool_broken, "dec.sync.aligned.u32 104", "inc.sync.aligned.u32 160")
REGISTERS(registers_pool_right, "dec.sync.aligned.u32 96", "inc.sync.aligned.u32 160")

// ---- what is left over at the end ----

// a bulk load that nobody waits for: it may land when the shared memory belongs to another block
__global__ void bulk_left_broken(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 1), fence_init(), arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}
__global__ void bulk_left_right(const float* a, float* b, int n) {
  __shared__ alignas(128) float tile[64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    init(bar, 1), fence_init(), arrive_expect(bar, 256), bulk_load(tile, a, 256, bar);
    wait(bar, 0);
  }
  if (threadIdx.x < 64) b[threadIdx.x] = a[threadIdx.x];
}

// ---- the barrier of a cluster of one block ----

#define CLUSTER(name, before, between, after)             \
  __global__ void name(const float* a, float* b, int n) { \
    __shared__ float tile[64];                            \
    before;                                               \
    between;                                              \
    cluster_wait();                                       \
    after;                                                \
  }
#define PUT \
  if (threadIdx.x < 64) tile[threadIdx.x] = a[threadIdx.x]
#define GET \
  if (threadIdx.x >= 64) b[threadIdx.x - 64] = tile[threadIdx.x - 64]
// what is written after the arrival is not handed over
CLUSTER(cluster_order_broken, cluster_arrive(), PUT, GET)
CLUSTER(cluster_order_right, PUT, cluster_arrive(), GET)
CLUSTER(cluster_relaxed_broken, PUT, cluster_relaxed(), GET)
CLUSTER(cluster_relaxed_right, PUT; __syncthreads(), cluster_relaxed(), GET)
CLUSTER(cluster_twice_broken, PUT; cluster_arrive(), cluster_arrive(), GET)
CLUSTER(cluster_twice_right, PUT; cluster_arrive(); cluster_wait(), cluster_arrive(), GET)
CLUSTER(cluster_early_broken, PUT, , __syncthreads(); GET)
CLUSTER(cluster_early_right, PUT, cluster_arrive(), __syncthreads(); GET)
// it is none of the 16 barriers of the block, and those who wait for it need not all stand there at once
CLUSTER(cluster_named_broken, if (threadIdx.x < 32) asm volatile("bar.arrive 15, 64;"), PUT; cluster_arrive(), GET)
CLUSTER(cluster_named_right, if (threadIdx.x < 32) asm volatile("bar.arrive 15, 64;"), PUT;
        cluster_arrive(), if (threadIdx.x / 32 == 3) asm volatile("bar.sync 15, 64;"); GET)
CLUSTER(cluster_deadlock_broken, PUT, if (threadIdx.x < 64) cluster_arrive(); else __syncthreads(), GET)
CLUSTER(cluster_deadlock_right, PUT, if (threadIdx.x >= 96) return;
        cluster_arrive(), if (threadIdx.x >= 32) b[threadIdx.x - 32] = tile[63])

// ---- polling that never ends ----

__global__ void poll_mbarrier(const float* a, float* b, int n) {
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) init(bar, 2), arrive(bar);
  __syncthreads();
  asm volatile(
      "{\n.reg .pred P;\nAGAIN:\nmbarrier.test_wait.parity.shared::cta.b64 P, [%0], 0;\n@!P bra AGAIN;\n}" ::"r"(
          shared_address(&bar))
      : "memory");
}
__global__ void poll_global(const float* a, float* b, int n) {
  while (reinterpret_cast<const volatile float*>(a)[1] == 1) {
  }
}

}  // extern "C"
