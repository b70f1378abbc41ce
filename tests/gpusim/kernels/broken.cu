// Pairs of kernels: `<what>_broken` does one thing wrong, `<what>_right` is its correct twin.
#include <cstdint>

namespace {
__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
}  // namespace

extern "C" {

// global memory: the bound is off by one
__global__ void global_bounds_broken(const float* a, float* b, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) b[i] = a[i];
}
__global__ void global_bounds_right(const float* a, float* b, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) b[i] = a[i];
}

// shared memory: one row too many
__global__ void shared_bounds_broken(const float* a, float* b, int n) {
  extern __shared__ float rows[];
  rows[threadIdx.x + 1] = a[threadIdx.x];
  b[threadIdx.x] = rows[threadIdx.x + 1];
}
__global__ void shared_bounds_right(const float* a, float* b, int n) {
  extern __shared__ float rows[];
  rows[threadIdx.x] = a[threadIdx.x];
  b[threadIdx.x] = rows[threadIdx.x];
}

// alignment of a vector load
__global__ void alignment_broken(const float* a, float* b, int n) {
  const float4 v = *reinterpret_cast<const float4*>(a + 1);
  b[threadIdx.x] = v.x + v.y + v.z + v.w;
}
__global__ void alignment_right(const float* a, float* b, int n) {
  const float4 v = *reinterpret_cast<const float4*>(a + 4);
  b[threadIdx.x] = v.x + v.y + v.z + v.w;
}

// shared memory read before it was written: the last element is forgotten
__global__ void uninitialized_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  if (threadIdx.x < 63) copy[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = copy[63 - threadIdx.x];
}
__global__ void uninitialized_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = copy[63 - threadIdx.x];
}

// read after write by another warp, without the barrier
__global__ void race_read_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = 0;
  __syncthreads();
  copy[threadIdx.x] = a[threadIdx.x];
  b[threadIdx.x] = copy[63 - threadIdx.x];
}
__global__ void race_read_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = 0;
  __syncthreads();
  copy[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = copy[63 - threadIdx.x];
}

// a tile overwritten while another warp may still read it: the second barrier of a loop is missing
__global__ void race_overwrite_broken(const float* a, float* b, int n) {
  __shared__ float tile[64];
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    tile[threadIdx.x] = a[threadIdx.x] + i;
    __syncthreads();
    sum += tile[63 - threadIdx.x];
  }
  b[threadIdx.x] = sum;
}
__global__ void race_overwrite_right(const float* a, float* b, int n) {
  __shared__ float tile[64];
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    tile[threadIdx.x] = a[threadIdx.x] + i;
    __syncthreads();
    sum += tile[63 - threadIdx.x];
    __syncthreads();
  }
  b[threadIdx.x] = sum;
}

// two warps write different values to one place
__global__ void race_write_broken(const float* a, float* b, int n) {
  __shared__ float last;
  if (threadIdx.x % 32 == 0) last = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = last;
}
__global__ void race_write_right(const float* a, float* b, int n) {
  __shared__ float last;
  if (threadIdx.x % 32 == 0) last = a[0];  // the same value from all: no harm
  __syncthreads();
  b[threadIdx.x] = last;
}

// neighbours of one byte or half are no race; the same half is
__global__ void race_bytes_broken(const float* a, float* b, int n) {
  __shared__ unsigned char bytes[64];
  bytes[threadIdx.x / 2 + threadIdx.x / 32] = static_cast<unsigned char>(threadIdx.x);
  __syncthreads();
  b[threadIdx.x] = bytes[0];
}
__global__ void race_bytes_right(const float* a, float* b, int n) {
  __shared__ unsigned char bytes[64];
  bytes[(threadIdx.x * 33) % 64] = static_cast<unsigned char>(threadIdx.x);
  __syncthreads();
  b[threadIdx.x] = bytes[threadIdx.x];
}

// lanes of a warp exchange through shared memory without __syncwarp
__global__ void race_lanes_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = a[threadIdx.x];
  b[threadIdx.x] = copy[threadIdx.x ^ 1];
}
__global__ void race_lanes_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = a[threadIdx.x];
  __syncwarp();
  b[threadIdx.x] = copy[threadIdx.x ^ 1];
}

// cp.async: read before the wait
__global__ void async_wait_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(copy + threadIdx.x)),
               "l"(a + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  b[threadIdx.x] = *static_cast<volatile float*>(copy + threadIdx.x);
  asm volatile("cp.async.wait_group 0;");
}
__global__ void async_wait_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(copy + threadIdx.x)),
               "l"(a + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  b[threadIdx.x] = *static_cast<volatile float*>(copy + threadIdx.x);
}

// cp.async: one group too many is left in flight
__global__ void async_groups_broken(const float* a, float* b, int n) {
  __shared__ float copy[2][64];
  for (int i = 0; i < 2; ++i) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&copy[i][threadIdx.x])),
                 "l"(a + threadIdx.x));
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  b[threadIdx.x] = copy[1][63 - threadIdx.x];
}
__global__ void async_groups_right(const float* a, float* b, int n) {
  __shared__ float copy[2][64];
  for (int i = 0; i < 2; ++i) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&copy[i][threadIdx.x])),
                 "l"(a + threadIdx.x));
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  b[threadIdx.x] = copy[0][63 - threadIdx.x];
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// the wait is there, but not the barrier after it
__global__ void async_barrier_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(copy + threadIdx.x)),
               "l"(a + threadIdx.x));
  asm volatile("cp.async.wait_all;" ::: "memory");
  b[threadIdx.x] = *static_cast<volatile float*>(copy + 63 - threadIdx.x);
}
__global__ void async_barrier_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(copy + threadIdx.x)),
               "l"(a + threadIdx.x));
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  b[threadIdx.x] = *static_cast<volatile float*>(copy + 63 - threadIdx.x);
}

// a warp has left before a barrier of the whole block
__global__ void exited_broken(const float* a, float* b, int n) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  b[threadIdx.x] = a[threadIdx.x];
}
__global__ void exited_right(const float* a, float* b, int n) {
  __syncthreads();
  if (threadIdx.x >= 32) return;
  b[threadIdx.x] = a[threadIdx.x];
}

// barriers that do not match: different counts
__global__ void barrier_count_broken(const float* a, float* b, int n) {
  if (threadIdx.x < 32)
    asm volatile("bar.sync 1, 64;");
  else
    asm volatile("bar.sync 1, 32;");
  b[threadIdx.x] = a[threadIdx.x];
}
__global__ void barrier_count_right(const float* a, float* b, int n) {
  if (threadIdx.x < 32)
    asm volatile("bar.sync 1, 64;");
  else
    asm volatile("bar.sync 1, 64;");
  b[threadIdx.x] = a[threadIdx.x];
}

// deadlock: each warp waits at another barrier
__global__ void deadlock_broken(const float* a, float* b, int n) {
  if (threadIdx.x < 32)
    asm volatile("bar.sync 1, 64;");
  else
    asm volatile("bar.sync 2, 64;");
  b[threadIdx.x] = a[threadIdx.x];
}
__global__ void deadlock_right(const float* a, float* b, int n) {
  if (threadIdx.x < 32)
    asm volatile("bar.arrive 1, 64;");
  else
    asm volatile("bar.sync 1, 64;");
  b[threadIdx.x] = a[threadIdx.x];
}

// half of a warp at a barrier that needs all of it, while the other half waits for the first half
__global__ void divergent_broken(const float* a, float* b, int n) {
  if (threadIdx.x & 1)
    __syncwarp();
  else
    __syncthreads();
  b[threadIdx.x] = a[threadIdx.x];
}
__global__ void divergent_right(const float* a, float* b, int n) {
  if (threadIdx.x & 1)
    __syncwarp(0xaaaaaaaa);
  else
    __syncwarp(0x55555555);
  __syncthreads();
  b[threadIdx.x] = a[threadIdx.x];
}

// a lane reads a shuffle from a lane that does not take part
__global__ void members_broken(const float* a, float* b, int n) {
  float v = a[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_down_sync(0x0000ffff, v, 16);
  b[threadIdx.x] = v;
}
__global__ void members_right(const float* a, float* b, int n) {
  float v = a[threadIdx.x];
  if (threadIdx.x % 32 < 16) v += __shfl_down_sync(0x0000ffff, v, 8, 16);
  b[threadIdx.x] = v;
}

// bar.arrive hands data from a producer to a consumer; without it nothing orders them
__global__ void producer_broken(const float* a, float* b, int n) {
  __shared__ float box[32];
  if (threadIdx.x < 32) {
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    box[threadIdx.x] = a[threadIdx.x];
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    b[threadIdx.x] = box[threadIdx.x - 32];
  }
}
__global__ void producer_right(const float* a, float* b, int n) {
  __shared__ float box[32];
  if (threadIdx.x < 32) {
    box[threadIdx.x] = a[threadIdx.x];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    b[threadIdx.x] = box[threadIdx.x - 32];
  }
}

// one warp arrives at a barrier that the other never comes to
__global__ void barrier_left_broken(const float* a, float* b, int n) {
  b[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x < 32) asm volatile("bar.arrive 1, 64;" ::: "memory");
}
__global__ void barrier_left_right(const float* a, float* b, int n) {
  b[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x < 32)
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  else
    asm volatile("bar.sync 1, 64;" ::: "memory");
}

// an address from which on the bytes pass 2^64
__global__ void wrapped_broken(const float* a, float* b, int n) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(~0ull - 15));
  b[threadIdx.x] = v.x;
}
__global__ void wrapped_right(const float* a, float* b, int n) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(a));
  b[threadIdx.x] = v.x;
}

// lanes 0 and 1 meet, but the place is that of a lane that was not there
__global__ void meet_broken(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x % 32 < 2) __syncwarp(3);
  b[threadIdx.x] = threadIdx.x % 32 < 2 ? copy[threadIdx.x ^ 2] : 0;
}
__global__ void meet_right(const float* a, float* b, int n) {
  __shared__ float copy[64];
  copy[threadIdx.x] = a[threadIdx.x];
  if (threadIdx.x % 32 < 2) __syncwarp(3);
  b[threadIdx.x] = threadIdx.x % 32 < 2 ? copy[threadIdx.x ^ 1] : 0;
}

// all lanes read, then one reads again, later, and writes
#define READERS(name, between)                              \
  __global__ void name(const float* a, float* b, int n) {   \
    __shared__ volatile float sum;                          \
    if (threadIdx.x == 0) sum = a[0];                       \
    __syncthreads();                                        \
    if (threadIdx.x < 32) {                                 \
      b[threadIdx.x] = *const_cast<float*>(&sum);           \
      asm volatile("fence.proxy.async;" ::: "memory");      \
      between;                                              \
      if (threadIdx.x == 0) *const_cast<float*>(&sum) += 1; \
    }                                                       \
  }
READERS(readers_broken, )
READERS(readers_right, __syncwarp())

// lanes of one store write different values, the last of them what was there before
__global__ void store_lanes_broken(const float* a, float* b, int n) {
  __shared__ float last;
  if (threadIdx.x == 0) last = 0;
  __syncthreads();
  if (threadIdx.x < 32) last = threadIdx.x == 0 ? 7.0f : 0.0f;
  __syncthreads();
  b[threadIdx.x] = last;
}
__global__ void store_lanes_right(const float* a, float* b, int n) {
  __shared__ float last;
  if (threadIdx.x == 0) last = 0;
  __syncthreads();
  if (threadIdx.x < 32) last = 7;
  __syncthreads();
  b[threadIdx.x] = last;
}

// a plain store beside an atomic one: which is last is not known, though they write the same
__global__ void store_atomic_broken(const float* a, float* b, int n) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(&flag, 1);
  if (threadIdx.x == 32) flag = 1;
  __syncthreads();
  b[threadIdx.x] = flag;
}
__global__ void store_atomic_right(const float* a, float* b, int n) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicExch(&flag, 1);
  __syncthreads();
  b[threadIdx.x] = flag;
}

// an atomic update of what another warp reads by a plain load
__global__ void atomic_read_broken(const float* a, float* b, int n) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (threadIdx.x < 32) b[threadIdx.x] = count;
  if (threadIdx.x == 32) atomicAdd(&count, 1);
}
__global__ void atomic_read_right(const float* a, float* b, int n) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (threadIdx.x < 32) b[threadIdx.x] = atomicAdd(&count, 0);
  if (threadIdx.x == 32) atomicAdd(&count, 1);
}

}  // extern "C"
