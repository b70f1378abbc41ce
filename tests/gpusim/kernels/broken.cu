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

}  // extern "C"
