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

// ---- attention ----

struct AttentionTile {
  int block_m, block_n;  // queries and keys
  int warps_m, warps_n;
  int blocks_per_sm;  // promised to the compiler
};

constexpr int threads(const AttentionTile& tile) { return tile.warps_m * tile.warps_n * kWarpSize; }

// Forward, 16-bit, by mma.sync. 32 queries a warp: with 16, ldmatrix keeps shared memory busy longer (10 clocks for
// each mma) than the mma keeps the tensor cores (8); with 32 it takes 6. One tile of keys and one of values: one is on
// its way while the other is multiplied, and a second block on the SM fills what gaps remain.
constexpr AttentionTile attention_fwd_tile(int head_dim, bool general) {
  // Where the accumulators of 32 queries leave a warp too few registers (256: there are 320 a thread; 128: 192, and
  // general scores need more beside them), two warps share their queries, each with half of the keys for the scores and
  // half of the columns for the output. Weights pass through shared memory, which is then busy for 8 clocks an mma.
  if (head_dim == 256 || (head_dim == 128 && general)) return {128, 64, 4, 2, 1};
  return {128, 64, 4, 1, 2};
}

struct AttentionBwdTile {
  int block_n, block_m;  // keys that a block owns, queries of a step
  int warps_n, warps_m;
  int stages;       // tiles of queries and of output gradients in shared memory
  int score_parts;  // a warp's scores are worked out in so many turns, ...
  int grad_parts;   // ... and its columns of dQ
};

constexpr int warps(const AttentionBwdTile& tile) { return tile.warps_n * tile.warps_m; }

// Backward, 16-bit, by mma.sync: one block an SM, whose eight warps have 255 registers a thread. 32 keys a warp: what
// ldmatrix brings serves two mma, and shared memory is busy 6.4 (64), 6.8 (128) and 8.8 clocks (256) for each of them,
// of which a tensor core takes 8.
constexpr AttentionBwdTile attention_bwd_tile(int head_dim, bool general) {
  // General scores keep fewer of them in registers at a time: beside them lie masks, biases and random words.
  if (head_dim == 64 && general) return {128, 64, 4, 2, 2, 2, 1};
  if (head_dim == 64) return {128, 128, 4, 2, 2, 1, 1};
  if (head_dim == 128 && general) return {128, 64, 4, 2, 2, 2, 2};
  if (head_dim == 128) return {128, 64, 4, 2, 2, 1, 1};
  // 128 keys would not leave room for queries in shared memory. Four warps share their keys, each with a quarter of the
  // columns of dK and dV: two warps would read them twice as often.
  return {64, 64, 2, 4, 1, 1, 2};
}

struct BiasGradTile {
  int block_m, block_n;
  int warps_m, warps_n;
  int stages;  // of 128 bytes of the head dimension
  int blocks_per_sm;
};

constexpr int threads(const BiasGradTile& tile) { return tile.warps_m * tile.warps_n * kWarpSize; }

// Gradient of attn_mask, which has three accumulators of a tile. As in the forward, 32 queries a warp.
constexpr BiasGradTile bias_grad_tile(int element_bytes) {
  // Half the accumulators: TF32 parts take registers, and three products of them keep the tensor cores busy anyway.
  if (element_bytes == 4) return {64, 64, 2, 2, 3, 3};
  return {128, 64, 4, 1, 3, 2};
}

// fp32, by mma.sync on TF32: rows padded to head_dim + 4 words. Each kernel fits where a block has least: sm_86, sm_89.
constexpr int kLeastSharedPerBlock = 99 * 1024;

// Forward. With 32 queries a warp, the parts of a key or a value are worked out for twice as many scores; 128 and 256
// have 64 and 128 accumulators of output a thread for 16, and narrow tiles of keys so that more blocks fit.
constexpr AttentionTile attention_fwd_tf32_tile(int head_dim) {
  if (head_dim == 64) return {128, 64, 4, 1, 2};  // 70 KB
  if (head_dim == 128) return {64, 32, 4, 1, 2};  // 68 KB
  return {64, 16, 4, 1, 1};                       // 100 KB: two fit on sm_90
}

// dQ. Two warps of 256 share their queries, each with half of the columns: each works out all scores.
constexpr AttentionTile attention_dq_tf32_tile(int head_dim) {
  if (head_dim == 64) return {64, 32, 4, 1, 3};   // 52 KB
  if (head_dim == 128) return {64, 32, 4, 1, 1};  // 99 KB: two fit on sm_90
  return {32, 16, 2, 2, 1};                       // 98 KB
}

// dK and dV: warps along the keys, twice the accumulators of dQ.
constexpr AttentionTile attention_dkdv_tf32_tile(int head_dim) {
  if (head_dim == 64) return {32, 64, 4, 1, 2};   // 53 KB
  if (head_dim == 128) return {16, 64, 4, 1, 1};  // 83 KB: two fit on sm_90
  return {16, 32, 2, 2, 1};                       // 98 KB
}

// Blocks that run together should read keys and values of a few heads only: less than half of A100's 40 MB of L2, as
// its two halves hold copies of the same lines.
constexpr int64_t kSectionBytes = int64_t{16} << 20;

}  // namespace mha_ext
