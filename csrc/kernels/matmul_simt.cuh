// Batched matrix product on the FMA units, at full fp32 and fp64 accuracy.
//
// A block computes kBlockM x kBlockN of one head of c, a thread 8 x 8 of it. Both operands lie in shared memory with m
// (n) contiguous; cp.async copies them element by element, which transposes where k is contiguous and never asks for
// alignment.
#pragma once

#include "attention/tile_config.h"
#include "device/ptx/cp_async.h"
#include "device/shared.h"
#include "device/types.h"
#include "device/warp.h"
#include "kernels/matmul.h"
#include "kernels/matmul_tiles.cuh"
#include "launch.h"

namespace mha_ext {

// One operand's tile: kBlockK lines of kBlockMN elements. Vectors of 16 bytes are permuted by an XOR with k, so that
// 8 lanes that hold the 8 elements of k of one row write to different banks.
template <typename Element, int kBlockMN_, bool kMnMajor_>
struct SimtTile {
  static constexpr int kBlockMN = kBlockMN_;
  static constexpr bool kMnMajor = kMnMajor_;
  static constexpr int kBlockK = matmul_simt_tile(sizeof(Element)).block_k_bytes / sizeof(Element);
  static constexpr int kVector = 16 / sizeof(Element);
  static_assert(kBlockK == 8 && kBlockMN % (8 * kVector) == 0);

  Element smem[kBlockK][kBlockMN];

  static constexpr __host__ __device__ int column(int k, int mn) { return mn ^ (k * kVector); }
};

// ---- global to shared ----

template <typename Element, typename Tile, int kThreads>
struct SimtLoader {
  static constexpr int kLineElements = Tile::kMnMajor ? Tile::kBlockMN : Tile::kBlockK;
  static constexpr int kLines = Tile::kMnMajor ? Tile::kBlockK : Tile::kBlockMN;
  static constexpr int kLinesPerPass = kThreads / kLineElements;
  static constexpr int kPasses = kLines / kLinesPerPass;
  static_assert(kThreads % kLineElements == 0 && kLines % kLinesPerPass == 0, "whole passes");

  OperandWalk walk;
  int line, col;  // this thread's element in the first pass

  __device__ __forceinline__ SimtLoader(const void* base, const Strides3& strides, int batch, int head, int64_t mn,
                                        int mn_begin, int tiles_k)
      : line(threadIdx.x / kLineElements), col(threadIdx.x % kLineElements) {
    walk = operand_walk<Element, Tile::kMnMajor>(base, strides, batch, head, mn, mn_begin, Tile::kBlockK, tiles_k, line,
                                                 col);
  }

  // Copies the next tile, zeros beyond the operand; k_left elements of k are left in this head.
  __device__ __forceinline__ void load(Tile& tile, int k_left) const {
    const int lines_left = Tile::kMnMajor ? k_left : walk.mn_left;
    const bool col_inside = col < (Tile::kMnMajor ? walk.mn_left : k_left);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int pass_line = line + pass * kLinesPerPass;
      const int k = Tile::kMnMajor ? pass_line : col, mn = Tile::kMnMajor ? col : pass_line;
      ptx::cp_async<sizeof(Element)>(shared_address(&tile.smem[k][Tile::column(k, mn)]),
                                     walk.source + pass * kLinesPerPass * walk.line_bytes,
                                     col_inside && pass_line < lines_left ? sizeof(Element) : 0);
    }
  }
};

// ---- the kernel ----

template <typename Element_, bool kTransposeA, bool kTransposeB>
struct MatmulSimt {
  using Element = Element_;
  static constexpr MatmulTile kTile = matmul_simt_tile(sizeof(Element));
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kBlockK = kTile.block_k_bytes / sizeof(Element);
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = threads(kTile);
  static constexpr int kVector = 16 / sizeof(Element);
  // A thread owns vectors kStepM (kStepN) apart; a warp is 4 x 8 threads.
  static constexpr int kLanesM = 4, kLanesN = 8;
  static constexpr int kStepM = kTile.warps_m * kLanesM * kVector, kStepN = kTile.warps_n * kLanesN * kVector;
  static constexpr int kVectorsM = kBlockM / kStepM, kVectorsN = kBlockN / kStepN;

  static constexpr int kUnroll = sizeof(Element) == 8 ? 4 : 8;  // lines of k in flight: 8 of fp64 spill

  using TileA = SimtTile<Element, kBlockM, kTransposeA>;
  using TileB = SimtTile<Element, kBlockN, !kTransposeB>;

  struct Stage {
    TileA a;
    TileB b;
  };
  struct Shared {
    Stage stage[kStages];
  };

  static_assert(kVectorsM * kVector == 8 && kVectorsN * kVector == 8);
  static_assert(kStepN % (kBlockK * kVector) == 0, "the XOR with k stays within a step");
  static_assert(sizeof(Stage) == stage_bytes(kTile) && fits(kTile, 64 * sizeof(Element) / 4));
};

// The thread's 8 elements of line k: vectors step apart, beginning at mn.
template <typename Tile, typename Element>
__device__ __forceinline__ void read_vectors(Element (&values)[8], const Tile& tile, int k, int mn, int step) {
#pragma unroll
  for (int v = 0; v < 8; v += Tile::kVector) {
    const auto vector =
        load_pack<Element, Tile::kVector>(&tile.smem[k][Tile::column(k, mn) + v / Tile::kVector * step]);
#pragma unroll
    for (int e = 0; e < Tile::kVector; ++e) values[v + e] = vector.at[e];
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    matmul_simt_kernel(const __grid_constant__ MatmulParams p, const __grid_constant__ MatmulPlan plan) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK;
  constexpr int kStages = Config::kStages, kVector = Config::kVector;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp / Config::kTile.warps_n, warp_n = warp % Config::kTile.warps_n;
  const int thread_m = (warp_m * Config::kLanesM + lane / Config::kLanesN) * kVector;
  const int thread_n = (warp_n * Config::kLanesN + lane % Config::kLanesN) * kVector;

  // Which heads, which rows, which columns, how much of k.
  const OutputTile tile = output_tile(blockIdx.x, p, plan);
  const int a_head = tile.head * p.group_sum / p.a_divisor, b_head = tile.head * p.group_sum / p.b_divisor;
  const int m_begin = tile.m_block * kBlockM, n_begin = tile.n_block * kBlockN;
  const int length_k = length_of_k(p, tile.batch), tiles_k = static_cast<int>(ceil_div(length_k, kBlockK));
  const int64_t steps = int64_t{p.group_sum} * tiles_k;
  SimtLoader<Element, typename Config::TileA, Config::kThreads> a_loader(p.a, p.a_strides, tile.batch, a_head, p.m,
                                                                         m_begin, tiles_k);
  SimtLoader<Element, typename Config::TileB, Config::kThreads> b_loader(p.b, p.b_strides, tile.batch, b_head, p.n,
                                                                         n_begin, tiles_k);
  int64_t loads_left = steps;
  int k_left = length_k;

  // One commit a step even when nothing is left, so that the wait below can count groups.
  const auto load_next = [&](typename Config::Stage& stage) {
    if (loads_left > 0) {
      a_loader.load(stage.a, k_left);
      b_loader.load(stage.b, k_left);
      k_left -= kBlockK;
      a_loader.walk.advance(k_left <= 0);
      b_loader.walk.advance(k_left <= 0);
      if (k_left <= 0) k_left = length_k;
      --loads_left;
    }
    ptx::cp_async_commit();
  };

  // Fill the pipeline.
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) load_next(shared.stage[stage]);

  // Multiply.
  Element acc[8][8] = {};
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait<kStages - 2>();  // this step's tiles are here ...
    __syncthreads();                    // ... all of them, and nobody reads the free stage any more
    load_next(shared.stage[free_stage]);
    const auto& current = shared.stage[stage];
#pragma unroll Config::kUnroll
    for (int k = 0; k < kBlockK; ++k) {
      Element a[8], b[8];
      read_vectors(a, current.a, k, thread_m, Config::kStepM);
      read_vectors(b, current.b, k, thread_n, Config::kStepN);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] = fma(a[i], b[j], acc[i][j]);
      }
    }
    free_stage = stage;
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }

  // Scale and store.
  const auto alpha = static_cast<Element>(p.alpha);
  Element* const c = static_cast<Element*>(p.c) + tile.batch * p.c_strides.batch + tile.head * p.c_strides.head;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = m_begin + thread_m + i / kVector * Config::kStepM + i % kVector;
    if (row >= p.m) break;
#pragma unroll
    for (int v = 0; v < Config::kVectorsN; ++v) {
      Pack<Element, kVector> vector;
#pragma unroll
      for (int e = 0; e < kVector; ++e) vector.at[e] = alpha * acc[i][v * kVector + e];
      const int col = n_begin + thread_n + v * Config::kStepN;
      store_outputs(c + row * p.c_strides.row + col, vector, p.n - col, plan.c_aligned);
    }
  }
}

// ---- the launcher ----

template <typename Element, bool kTransposeA, bool kTransposeB>
void launch_matmul_simt(const MatmulParams& p, cudaStream_t stream) {
  using Config = MatmulSimt<Element, kTransposeA, kTransposeB>;
  const MatmulPlan plan = matmul_plan(p, Config::kBlockM, Config::kBlockN, Config::kVector);
  launch(matmul_simt_kernel<Config>,
         {"matmul_simt", plan.tiles, Config::kThreads, sizeof(typename Config::Shared), stream}, p, plan);
}

template <typename Element>
void matmul_simt(const MatmulParams& p, cudaStream_t stream) {
  if (p.transpose_a) return launch_matmul_simt<Element, true, false>(p, stream);
  if (p.transpose_b) return launch_matmul_simt<Element, false, true>(p, stream);
  return launch_matmul_simt<Element, false, false>(p, stream);
}

}  // namespace mha_ext
