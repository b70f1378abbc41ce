// Small kernels whose results are known, one idea each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>

extern "C" {

__global__ void vector_add(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

__global__ void __launch_bounds__(1024) transpose(const float* a, float* b, int n) {
  __shared__ float tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  if (x < n && y < n) tile[threadIdx.y][threadIdx.x] = a[y * n + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x;
  y = blockIdx.x * 32 + threadIdx.y;
  if (x < n && y < n) b[y * n + x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void warp_sums(const float* a, float* sums) {
  float value = a[blockIdx.x * 32 + threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x == 0) sums[blockIdx.x] = value;
}

__global__ void atomics(const int* values, int* histogram, float* sum, unsigned long long* count, int n) {
  __shared__ int local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    atomicAdd(&local[values[i] & 15], 1);
    atomicAdd(sum, static_cast<float>(values[i]));
    atomicAdd(count, 1ull);
  }
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&histogram[threadIdx.x], local[threadIdx.x]);
}

__global__ void doubles(const double* a, const double* b, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = fma(a[i], b[i], 1.0) / (b[i] * b[i] + 1.0) + sqrt(fabs(a[i])) + exp(a[i]) + log(fabs(b[i]) + 1.0);
}

__global__ void floats(const float* a, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = expf(a[i]) + tanhf(a[i]) + sinf(a[i]) + logf(fabsf(a[i]) + 1.0f) + rsqrtf(fabsf(a[i]) + 1.0f) + a[i] / 3.0f;
}

__global__ void half_pairs(const __half2* a, const __half2* b, __half2* out, __nv_bfloat162* wide, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = __hfma2(a[i], b[i], __hadd2(a[i], b[i]));
  wide[i] = __float22bfloat162_rn(__half22float2(__hmax2(a[i], b[i])));
}

__global__ void integers(const int* a, const int* b, int* quotient, int* remainder, unsigned* high, long long* wide,
                         int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  quotient[i] = a[i] / b[i];
  remainder[i] = a[i] % b[i];
  high[i] = __umulhi(static_cast<unsigned>(a[i]), static_cast<unsigned>(b[i]));
  wide[i] = static_cast<long long>(a[i]) * b[i] / 7 + __popc(a[i]) + __clz(b[i]);
}

__device__ __noinline__ float square_plus(float x, float* squared) {
  *squared = x * x;
  return x + 1;
}
__global__ void calls(float* a) {
  float squared;
  const float plus = square_plus(a[threadIdx.x], &squared);
  a[threadIdx.x] = plus + squared;
}

// Each lane loops a different number of times, and only some lanes go through each branch.
__global__ void divergence(int* out) {
  const int lane = threadIdx.x;
  int value = 0;
  for (int i = 0; i < lane; ++i) {
    if (i % 3 == lane % 3)
      value += i;
    else
      value -= 1;
  }
  if (lane % 2) {
    value += __popc(__ballot_sync(0xaaaaaaaau, value > 0));
  } else {
    value -= __popc(__ballot_sync(0x55555555u, value > 0));
  }
  out[lane] = __reduce_add_sync(0xffffffffu, value) + lane;
}

__global__ void switches(const int* a, int* out) {
  int v = a[threadIdx.x], r;
  switch (v) {
    case 0: r = 5; break;
    case 1: r = v * 77; break;
    case 2: r = 3 - v; break;
    case 3: r = v * v; break;
    case 4: r = -1; break;
    case 5: r = a[0]; break;
    case 6: r = a[v]; break;
    default: r = 1000;
  }
  out[threadIdx.x] = r;
}

// One warp: C (16 x 8, fp32) = A (16 x 16, fp16, row-major) B (16 x 8, fp16, given as 8 x 16).
__global__ void mma_f16(const __half* a, const __half* b, float* c) {
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const auto* a32 = reinterpret_cast<const uint32_t*>(a);
  const auto* b32 = reinterpret_cast<const uint32_t*>(b);
  const uint32_t a0 = a32[g * 8 + t], a1 = a32[(g + 8) * 8 + t], a2 = a32[g * 8 + t + 4], a3 = a32[(g + 8) * 8 + t + 4];
  const uint32_t b0 = b32[g * 8 + t], b1 = b32[g * 8 + t + 4];
  float d[4] = {};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  for (int i = 0; i < 4; ++i) c[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
}

// The same through shared memory: cp.async, ldmatrix and ldmatrix.trans (B given as 16 x 8).
__global__ void mma_ldmatrix(const __half* a, const __half* b, float* c) {
  __shared__ __align__(16) __half a_smem[16 * 16];
  __shared__ __align__(16) __half b_smem[16 * 8];
  const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
  const auto shared = [](const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); };
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared(a_smem + lane * 8)), "l"(a + lane * 8));
  if (lane < 16)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared(b_smem + lane * 8)), "l"(b + lane * 8));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;");
  __syncwarp();
  uint32_t ra[4], rb[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
               : "r"(shared(a_smem + (lane % 16) * 16 + lane / 16 * 8)));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(rb[0]), "=r"(rb[1])
               : "r"(shared(b_smem + (lane % 16) * 8)));
  float d[4] = {};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  for (int i = 0; i < 4; ++i) c[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
}

__global__ void mma_f64(const double* a, const double* b, double* c) {
  const int lane = threadIdx.x;
  double d0 = 0, d1 = 0;
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+d"(d0), "+d"(d1)
      : "d"(a[lane]), "d"(b[(lane % 4) * 8 + lane / 4]));
  c[lane / 4 * 8 + 2 * (lane % 4)] = d0;
  c[lane / 4 * 8 + 2 * (lane % 4) + 1] = d1;
}

// A pipeline of two stages; the last copy is partial and filled with zeros.
__global__ void pipeline(const float* in, float* out, int n) {
  __shared__ __align__(16) float stage[2][128];
  const int tiles = (n + 127) / 128;
  const auto issue = [&](int tile) {
    if (tile < tiles) {
      const int at = tile * 128 + threadIdx.x * 4;
      const int bytes = max(0, min(16, (n - at) * 4));
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&stage[tile % 2][threadIdx.x * 4]));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(bytes ? in + at : in), "r"(bytes));
    }
    asm volatile("cp.async.commit_group;");
  };
  issue(0);
  float sum = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    issue(tile + 1);
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    for (int i = 0; i < 4; ++i) sum += stage[tile % 2][(threadIdx.x * 4 + i + 64) % 128];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}

__global__ void prints(int value) {
  if (threadIdx.x < 2) printf("thread %d of %s: %.2f %lld\n", threadIdx.x, "prints", value * 0.5, 1ll << 40);
}

__device__ int device_counter = 5;
__constant__ float table[4] = {1.5f, 2.5f, 3.5f, 4.5f};
__global__ void globals(float* out) {
  if (threadIdx.x == 0) device_counter += 1;
  out[threadIdx.x] = table[threadIdx.x % 4] + device_counter * 0;
}

// A barrier of the whole grid: all blocks must be alive at once.
__global__ void grid_barrier(int* arrived, int* out) {
  __shared__ int seen;
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < static_cast<int>(gridDim.x)) {
    }
    seen = *arrived;
  }
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = seen;
}

}  // extern "C"
