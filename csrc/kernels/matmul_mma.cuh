// Batched matrix product on the tensor cores: mma.sync fed by a cp.async pipeline (sm_80 and newer).
//
// A block computes kBlockM x kBlockN of one head of c. Per k tile it copies 64 bytes of k of both operands to shared
// memory, kStages tiles ahead; a warp then reads fragments of its own part and multiplies them.
// Operands lie "K-major" (k contiguous: a as stored, b transposed) or "MN-major" (m or n contiguous).
#pragma once

#include "attention/tile_config.h"
#include "device/fragment.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/ldmatrix.h"
#include "device/ptx/mma.h"
#include "device/shared.h"
#include "device/swizzle.h"
#include "device/types.h"
#include "device/warp.h"
#include "kernels/matmul.h"
#include "kernels/matmul_tiles.cuh"
#include "launch.h"

namespace mha_ext {

// One operand's tile in shared memory: kLines x kLineBytes, swizzled.
template <typename Element, int kBlockMN_, bool kMnMajor_>
struct OperandTile {
  static constexpr int kBlockMN = kBlockMN_;
  static constexpr bool kMnMajor = kMnMajor_;
  static constexpr int kBlockK = matmul_mma_tile(128).block_k_bytes / sizeof(Element);
  static constexpr int kLines = kMnMajor ? kBlockK : kBlockMN;
  static constexpr int kLineBytes = (kMnMajor ? kBlockMN : kBlockK) * sizeof(Element);
  static constexpr int kChunks = kLineBytes / kChunkBytes;
  static constexpr int kChunkElements = kChunkBytes / sizeof(Element);
  static constexpr int kBytes = kLines * kLineBytes;
  // ldmatrix transposes 16-bit elements only; 32-bit ones are read word by word.
  static constexpr bool kByWords = kMnMajor && sizeof(Element) == 4;
  static constexpr Swizzle kSwizzle = kByWords ? Swizzle::kWordBlock : Swizzle::kChunkColumn;

  static constexpr MHA_HOST_DEVICE int offset(int line, int chunk) {
    return swizzled_offset<kSwizzle, kLineBytes>(line, chunk);
  }
};

// ---- global to shared ----

template <typename Element, typename Tile, int kThreads>
struct TileLoader {
  static constexpr int kLinesPerPass = kThreads / Tile::kChunks;
  static constexpr int kPasses = Tile::kLines / kLinesPerPass;
  static_assert(kThreads % Tile::kChunks == 0 && Tile::kLines % kLinesPerPass == 0, "whole passes");
  static_assert(kLinesPerPass % kSwizzlePeriod<Tile::kSwizzle> == 0, "passes differ by whole lines");

  OperandWalk walk;
  int line, col;  // this thread's chunk in the first pass
  int offset;
  bool aligned;

  __device__ __forceinline__ TileLoader(const void* base, const Strides3& strides, bool aligned, int batch, int head,
                                        int64_t mn, int mn_begin, int tiles_k)
      : line(threadIdx.x / Tile::kChunks),
        col(threadIdx.x % Tile::kChunks * Tile::kChunkElements),
        offset(Tile::offset(line, threadIdx.x % Tile::kChunks)),
        aligned(aligned) {
    walk = operand_walk<Element, Tile::kMnMajor>(base, strides, batch, head, mn, mn_begin, Tile::kBlockK, tiles_k, line,
                                                 col);
  }

  // Copies the next tile, zeros beyond the operand; k_left elements of k are left in this head.
  __device__ __forceinline__ void load(unsigned char* tile, int k_left) const {
    const int lines_left = (Tile::kMnMajor ? k_left : walk.mn_left) - line;
    const int cols_left = (Tile::kMnMajor ? walk.mn_left : k_left) - col;
    if (!aligned) {
      copy_elements(tile, lines_left, cols_left);
    } else if (k_left >= Tile::kBlockK && walk.mn_left >= Tile::kBlockMN) {
      copy_chunks(tile, [](int) { return kChunkBytes; });
    } else {
      const int bytes = max(0, min(cols_left, Tile::kChunkElements)) * static_cast<int>(sizeof(Element));
      copy_chunks(tile, [&](int pass_line) { return pass_line < lines_left ? bytes : 0; });
    }
  }

  template <typename Bytes>
  __device__ __forceinline__ void copy_chunks(unsigned char* tile, Bytes bytes) const {
    const uint32_t shared = shared_address(tile) + offset;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int pass_line = pass * kLinesPerPass;
      ptx::cp_async<kChunkBytes>(shared + pass_line * Tile::kLineBytes, walk.source + pass_line * walk.line_bytes,
                                 bytes(pass_line));
    }
  }

  // The slow way, for rows that do not start on a multiple of 16 bytes.
  __device__ __forceinline__ void copy_elements(unsigned char* tile, int lines_left, int cols_left) const {
#pragma unroll 1
    for (int pass_line = 0; pass_line < Tile::kLines; pass_line += kLinesPerPass) {
      const auto* source = reinterpret_cast<const Element*>(walk.source + pass_line * walk.line_bytes);
      Pack<Element, Tile::kChunkElements> chunk;
#pragma unroll
      for (int i = 0; i < Tile::kChunkElements; ++i) {
        chunk.at[i] = pass_line < lines_left && i < cols_left ? source[i] : convert<Element>(0.0f);
      }
      *reinterpret_cast<decltype(chunk)*>(tile + offset + pass_line * Tile::kLineBytes) = chunk;
    }
  }
};

// ---- shared to registers ----

// Reads a warp's fragments. Their addresses differ by XORs within a swizzle pattern and by whole patterns otherwise:
// the former are worked out once and kept, the latter are immediates.
template <typename Element, Operand kOperand, typename Tile, int kFragments>
struct FragmentReader {
  static constexpr int kKeptFragments = Tile::kMnMajor ? (Tile::kByWords ? 2 : kFragments) : 1;
  static constexpr int kKeptHalves = Tile::kMnMajor && !Tile::kByWords ? 1 : 2;
  static constexpr int kFragmentChunks = kFragmentRows / Tile::kChunkElements;

  uint32_t kept[kKeptFragments][kKeptHalves];

  __device__ __forceinline__ FragmentReader(int mn_begin, int lane) {
    const int chunk = mn_begin / Tile::kChunkElements;
#pragma unroll
    for (int f = 0; f < kKeptFragments; ++f) {
#pragma unroll
      for (int half = 0; half < kKeptHalves; ++half) {
        if constexpr (!Tile::kMnMajor) {  // half of the tile's k
          kept[f][half] =
              Tile::offset(mn_begin + ldmatrix_row<kOperand>(lane), 2 * half + ldmatrix_chunk<kOperand>(lane));
        } else if constexpr (!Tile::kByWords) {
          kept[f][half] = Tile::offset(ldmatrix_trans_k<kOperand>(lane),
                                       chunk + f * kFragmentChunks + ldmatrix_trans_chunk<kOperand>(lane));
        } else {  // half of the fragment's rows
          const int row = mn_begin + f * kFragmentRows + half * 8 + lane / 4;
          kept[f][half] = Tile::offset(lane % 4, row / Tile::kChunkElements) + row % Tile::kChunkElements * 4;
        }
        ptx::keep(kept[f][half]);
      }
    }
  }

  __device__ __forceinline__ void read(uint32_t (&fragments)[kFragments][4], uint32_t tile, int k_step) const {
    constexpr int kStepK = kFragmentBytes / sizeof(Element);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      if constexpr (!Tile::kMnMajor) {
        ptx::ldmatrix_x4<false>(fragments[f], tile + kept[0][k_step] + f * kFragmentRows * Tile::kLineBytes);
      } else if constexpr (!Tile::kByWords) {
        ptx::ldmatrix_x4<true>(fragments[f], tile + kept[f][0] + k_step * kStepK * Tile::kLineBytes);
      } else {
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const int line = k_step * kStepK + quarter_k<kOperand>(reg) * 4;
          const int chunk = f / 2 * 2 * kFragmentChunks;  // two fragments are one swizzle pattern wide
          fragments[f][reg] = ptx::ld_shared_b32(tile + kept[f % 2][quarter_row<kOperand>(reg)] +
                                                 line * Tile::kLineBytes + chunk * kChunkBytes);
        }
      }
      if constexpr (sizeof(Element) == 4) {
#pragma unroll
        for (uint32_t& word : fragments[f]) word = ptx::cvt_rna_tf32(word);
      }
    }
  }
};

// ---- registers to global ----

// Stores a warp's accumulators at c. A lane holds two neighbours of each of two mma tiles: lanes exchange a pair,
// so that each holds four neighbours of one tile and a quad writes whole sectors.
template <typename Out, int kMmaM, int kMmaN>
__device__ __forceinline__ void store_accumulators(Out* c, int64_t row_stride, const float (&acc)[kMmaM][kMmaN][4],
                                                   float alpha, int rows_left, int cols_left, bool aligned, int lane) {
  const bool odd = lane & 1;
  const int col = accumulator_col(lane & ~1, 0) + (odd ? 8 : 0);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i * kFragmentRows + accumulator_row(lane, 2 * half);
      Out* const c_row = c + row * row_stride + col;
#pragma unroll
      for (int j = 0; j < kMmaN; j += 2) {
        Pack<Out, 4> out;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float left = alpha * acc[i][j][2 * half + e], right = alpha * acc[i][j + 1][2 * half + e];
          const float other = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
          out.at[e] = convert<Out>(odd ? other : left);
          out.at[2 + e] = convert<Out>(odd ? right : other);
        }
        if (row < rows_left) store_outputs(c_row + j * 8, out, cols_left - col - j * 8, aligned);
      }
    }
  }
}

// ---- the kernel ----

template <typename Element_, bool kTransposeA, bool kTransposeB, int kBlockN_>
struct MatmulMma {
  using Element = Element_;
  static constexpr MatmulTile kTile = matmul_mma_tile(kBlockN_);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kBlockK = kTile.block_k_bytes / sizeof(Element);
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = threads(kTile);
  static constexpr int kWarpM = kBlockM / kTile.warps_m, kWarpN = kBlockN / kTile.warps_n;
  static constexpr int kAccumulators = kWarpM * kWarpN / kWarpSize;
  static constexpr int kKSteps = kTile.block_k_bytes / kFragmentBytes;

  using TileA = OperandTile<Element, kBlockM, kTransposeA>;
  using TileB = OperandTile<Element, kBlockN, !kTransposeB>;

  struct Stage {
    unsigned char a_smem[TileA::kBytes];
    unsigned char b_smem[TileB::kBytes];
  };
  struct Shared {
    Stage stage[kStages];
  };

  static_assert(kBlockN == kBlockN_ && kBlockK == TileA::kBlockK && kKSteps == 2);
  static_assert(kWarpM % kFragmentRows == 0 && kWarpN % (2 * kFragmentRows) == 0);
  static_assert(TileA::kBytes % 1024 == 0 && TileB::kBytes % 1024 == 0, "tiles start on a swizzle pattern");
  static_assert(sizeof(Stage) == stage_bytes(kTile) && fits(kTile, kAccumulators));
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    matmul_mma_kernel(const __grid_constant__ MatmulParams p, const __grid_constant__ MatmulPlan plan) {
  using Element = typename Config::Element;
  using TileA = typename Config::TileA;
  using TileB = typename Config::TileB;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK;
  constexpr int kStages = Config::kStages;
  constexpr int kMmaM = Config::kWarpM / kFragmentRows, kMmaN = Config::kWarpN / 8;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp / Config::kTile.warps_n * Config::kWarpM;
  const int warp_n = warp % Config::kTile.warps_n * Config::kWarpN;
  const FragmentReader<Element, Operand::kA, TileA, kMmaM> a_reader(warp_m, lane);
  const FragmentReader<Element, Operand::kB, TileB, kMmaN / 2> b_reader(warp_n, lane);

  // Which heads, which rows, which columns, how much of k.
  const OutputTile tile = output_tile(blockIdx.x, p, plan);
  const int a_head = tile.head * p.group_sum / p.a_divisor, b_head = tile.head * p.group_sum / p.b_divisor;
  const int m_begin = tile.m_block * kBlockM, n_begin = tile.n_block * kBlockN;
  const int length_k = length_of_k(p, tile.batch), tiles_k = static_cast<int>(ceil_div(length_k, kBlockK));
  const int64_t steps = int64_t{p.group_sum} * tiles_k;
  TileLoader<Element, TileA, Config::kThreads> a_loader(p.a, p.a_strides, plan.a_aligned, tile.batch, a_head, p.m,
                                                        m_begin, tiles_k);
  TileLoader<Element, TileB, Config::kThreads> b_loader(p.b, p.b_strides, plan.b_aligned, tile.batch, b_head, p.n,
                                                        n_begin, tiles_k);
  int64_t loads_left = steps;
  int k_left = length_k;

  // One commit a step even when nothing is left, so that the wait below can count groups.
  const auto load_next = [&](typename Config::Stage& stage) {
    if (loads_left > 0) {
      a_loader.load(stage.a_smem, k_left);
      b_loader.load(stage.b_smem, k_left);
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
  float acc[kMmaM][kMmaN][4] = {};
  int stage = 0, free_stage = kStages - 1;
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait<kStages - 2>();  // this step's tiles are here ...
    __syncthreads();                    // ... all of them, and nobody reads the free stage any more
    load_next(shared.stage[free_stage]);
    const uint32_t a_tile = shared_address(shared.stage[stage].a_smem);
    const uint32_t b_tile = shared_address(shared.stage[stage].b_smem);
#pragma unroll
    for (int k_step = 0; k_step < Config::kKSteps; ++k_step) {
      uint32_t a[kMmaM][4], b[kMmaN / 2][4];
      a_reader.read(a, a_tile, k_step);
      b_reader.read(b, b_tile, k_step);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
          ptx::mma_m16n8<Element>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    free_stage = stage;
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }

  // Scale, round, store.
  const float alpha = static_cast<float>(p.alpha);
  const int64_t c_offset = tile.batch * p.c_strides.batch + tile.head * p.c_strides.head +
                           (m_begin + warp_m) * p.c_strides.row + n_begin + warp_n;
  const int rows_left = static_cast<int>(p.m - m_begin) - warp_m;
  const int cols_left = static_cast<int>(p.n - n_begin) - warp_n;
  if (sizeof(Element) == 4 || p.out_dtype == DType::kFloat32) {
    store_accumulators(static_cast<float*>(p.c) + c_offset, p.c_strides.row, acc, alpha, rows_left, cols_left,
                       plan.c_aligned, lane);
  } else {
    store_accumulators(static_cast<Element*>(p.c) + c_offset, p.c_strides.row, acc, alpha, rows_left, cols_left,
                       plan.c_aligned, lane);
  }
}

// ---- the launcher ----

template <typename Element, bool kTransposeA, bool kTransposeB, int kBlockN>
void launch_matmul_mma(const MatmulParams& p, cudaStream_t stream) {
  using Config = MatmulMma<Element, kTransposeA, kTransposeB, kBlockN>;
  const MatmulPlan plan = matmul_plan(p, Config::kBlockM, Config::kBlockN, 4);
  launch(matmul_mma_kernel<Config>,
         {"matmul_mma", plan.tiles, Config::kThreads, sizeof(typename Config::Shared), stream}, p, plan);
}

template <typename Element, int kBlockN>
void dispatch_matmul_mma(const MatmulParams& p, cudaStream_t stream) {
  if (p.transpose_a) return launch_matmul_mma<Element, true, false, kBlockN>(p, stream);
  if (p.transpose_b) return launch_matmul_mma<Element, false, true, kBlockN>(p, stream);
  return launch_matmul_mma<Element, false, false, kBlockN>(p, stream);
}

template <typename Element>
void matmul_mma(const MatmulParams& p, cudaStream_t stream) {
  if constexpr (sizeof(Element) == 4) {  // TF32: one width, which suits a head dimension of 64
    dispatch_matmul_mma<Element, 64>(p, stream);
  } else {
    // The narrow tile where the wide one would compute many columns in vain, or leave multiprocessors idle.
    const int64_t wide_tiles = p.batch * p.heads_c * ceil_div(p.m, 128) * ceil_div(p.n, 128);
    const bool narrow = p.n <= 64 || (p.n > 128 && p.n <= 192) || wide_tiles < kFewTiles;
    narrow ? dispatch_matmul_mma<Element, 64>(p, stream) : dispatch_matmul_mma<Element, 128>(p, stream);
  }
}

}  // namespace mha_ext
