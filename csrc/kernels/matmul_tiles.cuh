// What the matmul kernels share: which output tile a block computes, and the walk of an operand along k.
#pragma once

#include <cstdint>

#include "device/types.h"
#include "params.h"

namespace mha_ext {

// Worked out on the host, once a launch.
struct MatmulPlan {
  int64_t tiles;  // of all batches and heads
  int tiles_m, tiles_n;
  bool a_aligned, b_aligned, c_aligned;  // every row starts on a multiple of what one access moves
};

inline MatmulPlan matmul_plan(const MatmulParams& p, int block_m, int block_n, int store_elements) {
  const auto rows_align = [](const void* base, DType dtype, const Strides3& strides, int64_t elements) {
    return packs_align(base, dtype, elements, strides.batch, strides.head, strides.row);
  };
  const int64_t load_elements = 16 / size_of(p.in_dtype);
  MatmulPlan plan;
  plan.tiles_m = static_cast<int>(ceil_div(p.m, block_m));
  plan.tiles_n = static_cast<int>(ceil_div(p.n, block_n));
  plan.tiles = p.batch * p.heads_c * plan.tiles_m * plan.tiles_n;
  plan.a_aligned = rows_align(p.a, p.in_dtype, p.a_strides, load_elements);
  plan.b_aligned = rows_align(p.b, p.in_dtype, p.b_strides, load_elements);
  plan.c_aligned = rows_align(p.c, p.out_dtype, p.c_strides, store_elements);
  return plan;
}

// n runs fastest: a panel of rows of a is read once for all its tiles, and one head of b stays in L2.
// Neighbouring heads may share an operand (grouped queries), so heads come next, and then batches.
struct OutputTile {
  int batch, head;
  int m_block, n_block;
};

__device__ __forceinline__ OutputTile output_tile(int index, const MatmulParams& p, const MatmulPlan& plan) {
  OutputTile tile;
  tile.n_block = index % plan.tiles_n;
  index /= plan.tiles_n;
  tile.m_block = index % plan.tiles_m;
  index /= plan.tiles_m;
  tile.head = index % static_cast<int>(p.heads_c);
  tile.batch = index / static_cast<int>(p.heads_c);
  return tile;
}

// How much of k takes part in this batch.
__device__ __forceinline__ int length_of_k(const MatmulParams& p, int batch) {
  return static_cast<int>(p.k_lengths ? min(max(p.k_lengths[batch], int64_t{0}), p.k) : p.k);
}

// One thread's place in an operand. The operand is (rows of m or n) x k, or k x (m or n) when kMnMajor;
// "lines" are what is contiguous in memory: a line per row, or a line per k.
struct OperandWalk {
  const char* source;  // the first element that this thread copies of the next k tile
  int64_t line_bytes;  // from one line to the next
  int64_t tile_bytes;  // from one k tile to the next
  int64_t head_bytes;  // from behind the last k tile of a head to the first one of the next
  int mn_left;         // rows (columns) from the tile's first to the end of the operand

  __device__ __forceinline__ void advance(bool next_head) {
    source += tile_bytes;
    if (next_head) source += head_bytes;
  }
};

// line and col are this thread's first element within a tile.
template <typename Element, bool kMnMajor>
__device__ __forceinline__ OperandWalk operand_walk(const void* base, const Strides3& strides, int batch, int head,
                                                    int64_t mn, int mn_begin, int block_k, int tiles_k, int line,
                                                    int col) {
  constexpr int64_t kBytes = sizeof(Element);
  OperandWalk walk;
  walk.line_bytes = strides.row * kBytes;
  walk.tile_bytes = block_k * (kMnMajor ? walk.line_bytes : kBytes);
  walk.head_bytes = strides.head * kBytes - tiles_k * walk.tile_bytes;
  walk.mn_left = static_cast<int>(mn - mn_begin);
  const int first_line = kMnMajor ? line : mn_begin + line;
  const int first_col = kMnMajor ? mn_begin + col : col;
  walk.source = static_cast<const char*>(base) + (batch * strides.batch + head * strides.head) * kBytes +
                first_line * walk.line_bytes + first_col * kBytes;
  return walk;
}

}  // namespace mha_ext
