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
// 64 bytes of k: rows of half a line still fill whole sectors, and four stages then fit twice on an SM.
// Four stages: three are on their way while one is multiplied; 36 to 48 KB a block in flight covers HBM's latency.
constexpr MatmulTile matmul_mma_tile(int block_n) {
  // 64x64 a warp: ldmatrix then moves 128 bytes for each 16 bytes of a fragment used twice as often as with 64x32,
  // half the time of the tensor cores. 128 accumulators a thread leave room for two blocks an SM.
  if (block_n == 128) return {128, 128, 64, 2, 2, 4, 2};
  // n is one head dimension of 64, or there are few tiles: half the columns a warp, three blocks an SM.
  return {128, 64, 64, 2, 2, 4, 3};
}

// Below about one wave of the larger tiles (108 SMs on A100, 132 on H100) smaller tiles finish sooner.
constexpr int64_t kFewTiles = 128;

// FMA units. 8x8 outputs a thread: 64 FMA for four 16-byte loads (fp32). n is often one head dimension of 64.
// 8 elements of k a stage: that many lanes transpose a tile without meeting in a bank.
constexpr MatmulTile matmul_simt_tile(int element_bytes) {
  return {128, 64, 8 * element_bytes, 4, 1, 3, element_bytes == 8 ? 2 : 3};
}

constexpr bool fits(const MatmulTile& tile, int accumulator_registers) {
  const int registers = accumulator_registers + 32;  // fragments and addresses, at least
  return tile.blocks_per_sm * (tile.stages * stage_bytes(tile) + 1024) <= kSharedPerSm &&
         tile.blocks_per_sm * threads(tile) * registers <= kRegistersPerSm && registers <= kRegistersPerThread;
}

}  // namespace mha_ext
