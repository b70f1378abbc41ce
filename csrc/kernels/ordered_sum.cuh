// Sums to which many blocks contribute, one after the other in a fixed order: the same bits whatever runs when, and no
// zeros to begin with.
//
// A warp adds the same part of a sum in every block, so warps of one rank wait for each other and blocks never do. What
// has been added up lies in the order of the accumulators: each access of a warp is 512 bytes.
#pragma once

#include <cstdint>

#include "device/ptx/sync_global.h"
#include "device/warp.h"

namespace mha_ext {

// A block's place among those that contribute to a sum.
struct Turn {
  uint32_t rank;
  bool last;
};

// Adds this block's part to this warp's part of the sum; behind the last one, acc holds all of it. sum: this lane's
// place; turn: whose rank may add, 0 before the first.
// A block waits for those of lower rank: they must have begun before it.
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void add_in_order(float (&acc)[kMmaM][kMmaN][4], float4* sum, uint32_t* turn,
                                             const Turn& mine, int lane) {
  if (mine.rank > 0) {
    if (lane == 0) ptx::wait_acquire(turn, mine.rank);
    __syncwarp();  // what lane 0 knows of, the other lanes know of too
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        const float4 before = __ldcg(sum + (i * kMmaN + j) * kWarpSize);
        acc[i][j][0] += before.x;
        acc[i][j][1] += before.y;
        acc[i][j][2] += before.z;
        acc[i][j][3] += before.w;
      }
    }
  }
  if (!mine.last) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        __stcg(sum + (i * kMmaN + j) * kWarpSize, make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]));
      }
    }
    __syncwarp();
    if (lane == 0) ptx::st_release(turn, mine.rank + 1);
  }
}

}  // namespace mha_ext
