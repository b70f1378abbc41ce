// Tensor copies of 1 to 5 dimensions: a box into shared memory, its raw bytes out; raw bytes in, and a box from there.
#include "async_sm90.cuh"

struct alignas(64) Map {
  uint8_t bytes[128];
};
struct Coordinates {
  int at[5];
};

#define COORDINATES_1 "{%2}"
#define COORDINATES_2 "{%2, %3}"
#define COORDINATES_3 "{%2, %3, %4}"
#define COORDINATES_4 "{%2, %3, %4, %5}"
#define COORDINATES_5 "{%2, %3, %4, %5, %6}"
#define OPERANDS(c) "r"(c.at[0]), "r"(c.at[1]), "r"(c.at[2]), "r"(c.at[3]), "r"(c.at[4])

#define LOAD(rank)                                                                                                     \
  extern "C" __global__ void load_##rank##d(const __grid_constant__ Map map, Coordinates c, uint8_t* out, b32 bytes) { \
    uint8_t* tile = aligned_shared();                                                                                  \
    __shared__ b64 place;                                                                                              \
    const b32 barrier = shared_address(&place);                                                                        \
    if (threadIdx.x == 0) {                                                                                            \
      init_for_copies(barrier, 1);                                                                                     \
      arrive_expect(barrier, bytes);                                                                                   \
      asm volatile("cp.async.bulk.tensor." #rank                                                                       \
                   "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " COORDINATES_##rank              \
                   "], [%7];" ::"r"(shared_address(tile)),                                                             \
                   "l"(&map), OPERANDS(c), "r"(barrier)                                                                \
                   : "memory");                                                                                        \
    }                                                                                                                  \
    __syncthreads();                                                                                                   \
    wait(barrier, 0);                                                                                                  \
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = tile[i];                                            \
  }
#define FROM_SHARED(name, opcode, rank)                                                                              \
  extern "C" __global__ void name##_##rank##d(const __grid_constant__ Map map, Coordinates c, const uint8_t* in,     \
                                              b32 bytes) {                                                           \
    uint8_t* tile = aligned_shared();                                                                                \
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) tile[i] = in[i];                                           \
    to_async_proxy();                                                                                                \
    __syncthreads();                                                                                                 \
    if (threadIdx.x == 0) {                                                                                          \
      asm volatile(opcode " [%1, " COORDINATES_##rank "], [%0];" ::"r"(shared_address(tile)), "l"(&map), OPERANDS(c) \
                   : "memory");                                                                                      \
      commit_and_wait();                                                                                             \
    }                                                                                                                \
  }
#define ALL(rank)                                                                           \
  LOAD(rank)                                                                                \
  FROM_SHARED(store, "cp.async.bulk.tensor." #rank "d.global.shared::cta.bulk_group", rank) \
  FROM_SHARED(add, "cp.reduce.async.bulk.tensor." #rank "d.global.shared::cta.add.bulk_group", rank)
ALL(1)
ALL(2)
ALL(3)
ALL(4)
ALL(5)

// With a cache hint, multicast to the only block of the cluster, and a prefetch before it.
extern "C" __global__ void load_hints(const __grid_constant__ Map map, Coordinates c, uint8_t* out, b32 bytes) {
  uint8_t* tile = aligned_shared();
  __shared__ b64 place;
  const b32 barrier = shared_address(&place);
  if (threadIdx.x == 0) {
    init_for_copies(barrier, 1);
    arrive_expect(barrier, 2 * bytes);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(c.at[0]), "r"(c.at[1])
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
        "%3}], [%4], %5;" ::"r"(shared_address(tile)),
        "l"(&map), "r"(c.at[0]), "r"(c.at[1]), "r"(barrier), "l"(0x12F0000000000000)
        : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(shared_address(tile + bytes)),
        "l"(&map), "r"(c.at[0]), "r"(c.at[1]), "r"(barrier), "h"(static_cast<b16>(1))
        : "memory");
  }
  __syncthreads();
  wait(barrier, 0);
  for (int i = threadIdx.x; i < 2 * bytes; i += blockDim.x) out[i] = tile[i];
}
