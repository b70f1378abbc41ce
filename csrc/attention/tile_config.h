// The numbers that decide speed, each with its reason. What is not a number is in the kernels.
#pragma once

#include <cstdint>

#include "device/warp.h"

namespace mha_ext {

constexpr int kSharedPerSm = 164 * 1024;  // sm_80 (sm_90: 228 KB); a block takes 1 KB more than it asks for
constexpr int kRegistersPerSm = 64 * 1024;
constexpr int kRegistersPerThread = 255;

struct MatmulTile {
  int block_m, block_n;  // of the output
  int block_k_bytes;     // bytes of k a stage holds, for each row of a and column of b
  int warps_m, warps_n;
  int stages;
  int blocks_per_sm;  // promised to the compiler, which then keeps to 65536 / (threads * blocks) registers
};

constexpr int threads(const MatmulTile& tile) { return tile.warps_m * tile.warps_n * kWarpSize; }
constexpr int stage_bytes(const MatmulTile& tile) { return (tile.block_m + tile.block_n) * tile.block_k_bytes; }

// Tensor cores (sm_80 and newer).
// 64 bytes of k a stage: half a line of each row still fills whole sectors, and four stages fit an SM two or three
// times. Four stages: three are on their way while one is multiplied, 36 or 48 KB a block, which covers the latency of
// HBM.
constexpr MatmulTile matmul_mma_tile(int block_n) {
  // 64x64 a warp: 8 ldmatrix for 32 mma, which keeps shared memory busy half as long as the tensor cores (64x32: 6 for
  // 16, three quarters). Its 128 accumulators a thread leave room for two blocks an SM.
  if (block_n == 128) return {128, 128, 64, 2, 2, 4, 2};
  // Where n is one head of 64, or tiles are few: 64x32 a warp, three blocks an SM.
  return {128, 64, 64, 2, 2, 4, 3};
}

// Below about one wave of wide tiles (108 SMs on A100, 132 on H100) narrow ones finish sooner.
constexpr int64_t kFewTiles = 128;

// FMA units. 8x8 outputs a thread: 64 FMA for four (fp64: eight) 16-byte loads; n is often one head of 64.
// 8 elements of k a stage: as many lanes transpose a tile without meeting in a bank.
// Blocks an SM: what 8x8 accumulators and the loads in flight leave room for, without spills.
constexpr MatmulTile matmul_simt_tile(int element_bytes) {
  return {128, 64, 8 * element_bytes, 4, 1, 3, element_bytes == 8 ? 2 : 3};
}

constexpr bool fits(const MatmulTile& tile, int accumulator_registers) {
  const int registers = accumulator_registers + 32;  // fragments and addresses, at least
  return tile.blocks_per_sm * (tile.stages * stage_bytes(tile) + 1024) <= kSharedPerSm &&
         tile.blocks_per_sm * threads(tile) * registers <= kRegistersPerSm && registers <= kRegistersPerThread;
}

}  // namespace mha_ext
