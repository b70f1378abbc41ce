// Products of fp32 attention on the TF32 tensor cores: what forward and both backward kernels are made of.
//
//   score_product      rows of a tile times rows of another: Q K^T, dO V^T and their transposes
//   add_weighted_rows  accumulators of a score product, as they lie in registers, times the rows of a tile: P V, dS K
//
// A tensor core rounds its sum at every step, and towards zero. So no chain of mma is long: 64 columns of a score, or a
// tile of weighted rows, are a sum of their own, and such sums are added up by fp32 additions.
#pragma once

#include "device/fragment.h"
#include "device/ptx/ldmatrix.h"
#include "device/shared.h"
#include "device/swizzle.h"
#include "device/tf32.h"
#include "device/types.h"

namespace mha_ext {

constexpr int kPartCols = 64;
constexpr int kGroupCols = 32;  // columns beyond head_dim are skipped in groups of so many

// Rows as in global memory, padded by a chunk: neither one chunk of eight rows (ldmatrix) nor two chunks of four rows
// (load_weighted_rows) meet in a bank.
template <int kRows_, int kHeadDim>
struct PaddedTile {
  static constexpr int kRows = kRows_, kRowBytes = kHeadDim * 4;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static constexpr int kPitch = kRowBytes + kChunkBytes;
  static constexpr int kPeriod = 1;

  static constexpr MHA_HOST_DEVICE int offset(int row, int chunk) { return row * kPitch + chunk * kChunkBytes; }

  alignas(kChunkBytes) unsigned char bytes[kRows * kPitch];
};

// acc = factor acc + part, with a factor for each row that a lane has.
template <int kMmaM, int kMmaN, int kPartN, typename FactorOf>
__device__ __forceinline__ void add_part(float (&acc)[kMmaM][kMmaN][4], const float (&part)[kMmaM][kPartN][4],
                                         int n_begin, FactorOf factor_of) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int n = 0; n < kPartN; ++n) {
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) {
        float& sum = acc[i][n_begin + n][reg];
        sum = sum * factor_of(2 * i + reg / 2) + part[i][n][reg];
      }
    }
  }
}

// ---- rows times rows ----

// Where a lane reads the fragments that begin at a row of a tile.
template <Operand kOperand, typename Tile>
__device__ __forceinline__ uint32_t fragment_address(const Tile& tile, int row, int lane) {
  return shared_address(tile.bytes) + Tile::offset(row + ldmatrix_row<kOperand>(lane), ldmatrix_chunk<kOperand>(lane));
}

template <int kProducts>
__device__ __forceinline__ Tf32Operand<kProducts, 4> load_fragment(uint32_t address) {
  uint32_t words[4];
  ptx::ldmatrix_x4<false>(words, address);
  Tf32Operand<kProducts, 4> fragment;
#pragma unroll
  for (int i = 0; i < 4; ++i) fragment.set(i, __uint_as_float(words[i]));
  return fragment;
}

// scores = a b^T over the first head_dim columns, at least one: 16 kMmaM rows of a, 8 kMmaN of b, each given by its
// fragment_address.
template <int kProducts, int kHeadDim, int kMmaM, int kMmaN>
__device__ __forceinline__ void score_product(float (&scores)[kMmaM][kMmaN][4], uint32_t a, uint32_t b, int head_dim) {
  constexpr int kPitch = PaddedTile<1, kHeadDim>::kPitch;
  constexpr int kStepCols = kFragmentBytes / 4;
#pragma unroll
  for (int part_col = 0; part_col < kHeadDim; part_col += kPartCols) {
    if (part_col > 0 && part_col >= head_dim) break;
    float part[kMmaM][kMmaN][4];
#pragma unroll
    for (int col = part_col; col < part_col + kPartCols; col += kStepCols) {
      if (col > part_col && col % kGroupCols == 0 && col >= head_dim) break;
      Tf32Operand<kProducts, 4> a_fragments[kMmaM];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        a_fragments[i] = load_fragment<kProducts>(a + i * kFragmentRows * kPitch + col * 4);
      }
#pragma unroll
      for (int n = 0; n < kMmaN; n += 2) {
        const auto b_fragment = load_fragment<kProducts>(b + n * 8 * kPitch + col * 4);
        col == part_col ? multiply_tf32<true>(part, n, a_fragments, b_fragment)
                        : multiply_tf32<false>(part, n, a_fragments, b_fragment);
      }
    }
    if (part_col == 0) {
      memcpy(scores, part, sizeof(part));
    } else {
      add_part(scores, part, 0, [](int) { return 1.0f; });
    }
  }
}

// ---- weights times rows ----

// Where a lane reads the rows of a tile, from a column on; see weighted_row() in device/fragment.h.
template <typename Tile>
__device__ __forceinline__ uint32_t weighted_address(const Tile& tile, int col, int lane) {
  return shared_address(tile.bytes) + Tile::offset(weighted_row(lane), (col + weighted_col(lane)) * 4 / kChunkBytes);
}

template <int kProducts>
__device__ __forceinline__ Tf32Operand<kProducts, 8> load_weighted_rows(uint32_t address, int pitch) {
  Tf32Operand<kProducts, 8> operand;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float words[4];
    ptx::ld_shared_v4(words, address + row * pitch);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) operand.set(2 * tile + row, words[tile]);
  }
  return operand;
}

// out = factor out + weights rows over 8 kMmaN columns, of which the first head_dim count. rows: the weighted_address
// of a tile of 8 kMmaK rows, which the columns of weights stand for.
template <int kProducts, int kHeadDim, int kMmaM, int kMmaK, int kMmaN, typename FactorOf>
__device__ __forceinline__ void add_weighted_rows(float (&out)[kMmaM][kMmaN][4],
                                                  const float (&weights)[kMmaM][kMmaK][4], uint32_t rows, int head_dim,
                                                  FactorOf factor_of) {
  constexpr int kPitch = PaddedTile<1, kHeadDim>::kPitch;
  constexpr int kGroup = kGroupCols / 8, kPart = kPartCols / 8;
#pragma unroll
  for (int part_n = 0; part_n < kMmaN; part_n += kPart) {
    if (part_n > 0 && part_n * 8 >= head_dim) break;
    float part[kMmaM][kPart][4];
#pragma unroll
    for (int k = 0; k < kMmaK; ++k) {
      Tf32Operand<kProducts, 4> a[kMmaM];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) a[i].set(reg, weights[i][k][weight_register(reg)]);
      }
#pragma unroll
      for (int n = 0; n < kPart; n += kGroup) {
        if (n > 0 && (part_n + n) * 8 >= head_dim) break;
        const auto b = load_weighted_rows<kProducts>(rows + k * 8 * kPitch + (part_n + n) * 8 * 4, kPitch);
        k == 0 ? multiply_tf32<true>(part, n, a, b) : multiply_tf32<false>(part, n, a, b);
      }
    }
    add_part(out, part, part_n, factor_of);
  }
}

// Row `half` of the two that a lane has of an accumulator becomes 0: a NaN beside a weight of 0 is NaN.
template <int kMmaN>
__device__ __forceinline__ void clear_row(float (&out)[kMmaN][4], int half) {
#pragma unroll
  for (int n = 0; n < kMmaN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) out[n][2 * half + e] = 0.0f;
  }
}

// Row `half` of the two that a lane has of an accumulator, times scale. row: where its column 0 lies.
template <int kMmaN>
__device__ __forceinline__ void store_row(float* row, const float (&out)[kMmaN][4], int half, float scale, int head_dim,
                                          bool aligned, int lane) {
#pragma unroll
  for (int n = 0; n < kMmaN; n += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = n * 8 + weighted_out_col(0, accumulator_col(lane, e));
      Pack<float, 4> pack;
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) pack.at[tile] = scale * out[n + tile][2 * half + e];
      store_outputs(row + col, pack, head_dim - col, aligned);
    }
  }
}

}  // namespace mha_ext
