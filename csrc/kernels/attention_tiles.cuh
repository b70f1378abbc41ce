// What the attention kernels share: which tile a block works on, and a tile's way from a tensor through shared memory
// into mma fragments.
#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/tile_config.h"
#include "device/fragment.h"
#include "device/ptx/cp_async.h"
#include "device/ptx/ldmatrix.h"
#include "device/shared.h"
#include "device/swizzle.h"
#include "device/types.h"
#include "device/warp.h"
#include "params.h"

namespace mha_ext {

// ---- which tile ----

// The rows of one batch: all rows of a tensor, or a segment of a packed one. What cu_seqlens says is clamped to the
// tensor, so that nothing outside is touched whatever it says.
struct Sequence {
  int first, length;
};

__device__ __forceinline__ Sequence sequence_of(const int32_t* cu_seqlens, int64_t seqlen, int64_t batch) {
  if (!cu_seqlens) return {0, static_cast<int>(seqlen)};
  const int64_t first = clamp(cu_seqlens[batch], 0, seqlen);
  return {static_cast<int>(first), static_cast<int>(clamp(cu_seqlens[batch + 1], first, seqlen) - first)};
}

// The order in which blocks take tiles. Consecutive (batch, head) pairs form sections whose keys and values stay in L2
// together. Within a section the tiles of one rank, one of each head, follow each other: where ranks are in the order
// of their work, the longest are the first to start and the short ones fill the gaps at the end.
struct TileOrder {
  int tiles;    // of a head; of a packed tensor: at most so many over all batches
  int heads;    // whose tiles are told apart: of queries or of keys
  int pairs;    // batch * heads; of a packed tensor: heads
  int section;  // pairs
  int block;    // places of the sequence that a tile covers

  int64_t blocks() const { return int64_t{tiles} * pairs; }
};

// cu_seqlens: of the axis that is cut into tiles, seqlen its length (packed: the total), pair_bytes what one pair wants
// to keep in L2.
inline TileOrder tile_order(const int32_t* cu_seqlens, int64_t seqlen, int64_t batch, int heads, int block,
                            int64_t pair_bytes) {
  TileOrder order;
  order.tiles = static_cast<int>(cu_seqlens ? seqlen / block + batch : (seqlen + block - 1) / block);
  order.heads = heads;
  order.pairs = static_cast<int>(cu_seqlens ? heads : batch * heads);
  order.section = static_cast<int>(clamp(kSectionBytes / (pair_bytes > 0 ? pair_bytes : 1), 1, order.pairs));
  order.block = block;
  return order;
}

struct TileIndex {
  int batch, head, tile;  // tile: within the sequence; -1: none
};

// A packed tensor has no room for a table of tiles, and the host does not know its lengths. Batch b takes the indices
// from packed_tile(b) on: enough for its own length, as floor(x + y) + 1 >= floor(x) + ceil(y). What is left over is
// idle.
__device__ __forceinline__ int packed_tile(const int32_t* cu_seqlens, int64_t seqlen, const TileOrder& order,
                                           int64_t batch) {
  return static_cast<int>(clamp(cu_seqlens[batch], 0, seqlen) / order.block + batch);
}

// descending: rank 0 is the last tile of a sequence.
__device__ __forceinline__ TileIndex tile_index(int index, const TileOrder& order, const int32_t* cu_seqlens,
                                                int64_t seqlen, int64_t batch, bool descending) {
  const int section = index / (order.section * order.tiles);
  index -= section * (order.section * order.tiles);
  const int first_pair = section * order.section;
  const int pairs = min(order.section, order.pairs - first_pair);
  const int pair = first_pair + index % pairs;
  const int rank = index / pairs;
  const int tile = descending ? order.tiles - 1 - rank : rank;
  if (!cu_seqlens) return {pair / order.heads, pair % order.heads, tile};

  int low = 0, high = static_cast<int>(batch) - 1;  // the last batch that begins at or before `tile`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (packed_tile(cu_seqlens, seqlen, order, middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int local = tile - packed_tile(cu_seqlens, seqlen, order, low);
  const int length = max(sequence_of(cu_seqlens, seqlen, low).length, 1);  // without rows: one tile, an empty one
  return {low, pair, local >= 0 && int64_t{local} * order.block < length ? local : -1};
}

// ---- global to shared ----

// kRows x kRowBytes in shared memory, swizzled so that neither a copy along a row nor ldmatrix down a column meets a
// bank twice.
template <int kRows_, int kRowBytes_>
struct SharedTile {
  static constexpr int kRows = kRows_, kRowBytes = kRowBytes_;
  static constexpr int kChunks = kRowBytes / kChunkBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kPitch = kRowBytes;                               // from one row to the next
  static constexpr int kPeriod = kSwizzlePeriod<Swizzle::kChunkColumn>;  // rows so far apart lie a constant apart
  static_assert(kChunks % 8 == 0, "the swizzle permutes 128 bytes");

  static constexpr MHA_HOST_DEVICE int offset(int row, int chunk) {
    return swizzled_offset<Swizzle::kChunkColumn, kRowBytes>(row, chunk);
  }
};

// Copies rows of a head to a tile, by cp.async. A thread has one chunk of 16 bytes in every kRowsPerPass-th row; what
// lies beyond the head dimension is filled with zeros.
template <typename Element, typename Tile, int kThreads>
struct RowLoader {
  static constexpr int kRows = Tile::kRows;
  static constexpr int kRowsPerPass = kThreads / Tile::kChunks;
  static constexpr int kPasses = Tile::kRows / kRowsPerPass;
  static_assert(kThreads % Tile::kChunks == 0 && Tile::kRows % kRowsPerPass == 0, "whole passes");
  static_assert(kRowsPerPass % Tile::kPeriod == 0, "passes lie a constant apart");

  const char* source;  // this thread's chunk of row 0
  int64_t row_bytes;
  int row;             // this thread's first row in a tile ...
  uint32_t offset;     // ... and its place there
  int inside;          // bytes of its chunk that lie within the head dimension
  bool fills_columns;  // the head dimension is that of the tile

  // head: row 0 of the sequence.
  __device__ __forceinline__ RowLoader(const Element* head, int64_t row_stride, int head_dim) {
    const int chunk = threadIdx.x % Tile::kChunks;
    row = threadIdx.x / Tile::kChunks;
    offset = Tile::offset(row, chunk);
    row_bytes = row_stride * static_cast<int64_t>(sizeof(Element));
    source = reinterpret_cast<const char*>(head) + row * row_bytes + chunk * kChunkBytes;
    ptx::keep(source);
    ptx::keep(offset);
    const int head_bytes = head_dim * static_cast<int>(sizeof(Element));
    inside = min(max(head_bytes - chunk * kChunkBytes, 0), kChunkBytes);
    fills_columns = head_bytes == Tile::kRowBytes;
  }

  // Rows first .. first + kRows - 1, all of which exist.
  __device__ __forceinline__ void load(uint32_t tile, int first) const {
    if (fills_columns) {
      copy(tile, first, [](int) { return kChunkBytes; });
    } else {
      copy(tile, first, [&](int) { return inside; });
    }
  }

  // The same, with zeros for the rows r of the tile where keep(r) is false: they are not read.
  template <typename Keep>
  __device__ __forceinline__ void load_where(uint32_t tile, int first, Keep keep) const {
    copy(tile, first, [&](int tile_row) { return keep(tile_row) ? inside : 0; });
  }

  template <typename Bytes>
  __device__ __forceinline__ void copy(uint32_t tile, int first, Bytes bytes) const {
    const char* from = source + static_cast<uint32_t>(first) * static_cast<uint64_t>(row_bytes);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      ptx::cp_async<kChunkBytes>(tile + offset + pass * kRowsPerPass * Tile::kPitch, from,
                                 bytes(row + pass * kRowsPerPass));
      from += kRowsPerPass * row_bytes;
    }
  }
};

// ---- shared to registers ----

// Reads fragments of 16 rows by 32 bytes, or transposed ones: of 32 bytes along a row by 16 rows of k. Addresses differ
// by an XOR within 128 bytes of a row, which is worked out once and kept, and by an immediate otherwise.
template <Operand kOperand, bool kTranspose, typename Tile, int kSteps_ = 4>
struct TileReader {
  static constexpr int kSteps = kSteps_;  // of 32 bytes: one swizzle pattern, or what is read of one

  uint32_t kept[kSteps];

  // The tile is read from this row (a multiple of 8) and this byte of a row (a multiple of 32 kSteps) on.
  __device__ __forceinline__ TileReader(const unsigned char* tile, int first_row, int first_byte, int lane) {
    const int row = first_row + (kTranspose ? ldmatrix_trans_k<kOperand>(lane) : ldmatrix_row<kOperand>(lane));
    const int chunk = kTranspose ? ldmatrix_trans_chunk<kOperand>(lane) : ldmatrix_chunk<kOperand>(lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      kept[step] = shared_address(tile) + Tile::offset(row, first_byte / kChunkBytes + 2 * step + chunk);
      ptx::keep(kept[step]);
    }
  }

  // From here on the tile so many bytes further.
  __device__ __forceinline__ void move(uint32_t bytes) {
#pragma unroll
    for (uint32_t& address : kept) address += bytes;
  }

  // Fragment `row_step` down the rows and `byte_step` along them; both constants. tile_offset: from the tile that the
  // reader was made for to another, in bytes.
  // flip: an XOR of the byte within a row.
  __device__ __forceinline__ void read(uint32_t (&fragment)[4], int row_step, int byte_step, uint32_t tile_offset = 0,
                                       uint32_t flip = 0) const {
    ptx::ldmatrix_x4<kTranspose>(fragment, (kept[byte_step % kSteps] ^ flip) +
                                               row_step * kFragmentRows * Tile::kRowBytes +
                                               byte_step / kSteps * kSteps * kFragmentBytes + tile_offset);
  }
};

// ---- registers to global ----

// Rounds a warp's accumulators and stores them. row_of(i, half) is where row 16 i + 8 half + lane / 4 of the warp
// begins (its own first column), null for a row that does not exist; `columns` are left from there on. A lane holds two
// neighbours of each of two mma tiles: lanes exchange a pair, so that each stores four neighbours of one tile and a
// quad whole sectors. aligned: rows start on four elements.
template <typename Out, int kMmaM, int kMmaN, typename RowOf>
__device__ __forceinline__ void store_rows(const float (&acc)[kMmaM][kMmaN][4], int columns, bool aligned, int lane,
                                           RowOf row_of) {
  const bool odd = lane & 1;
  const int col = accumulator_col(lane & ~1, 0) + (odd ? 8 : 0);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Out* const out_row = row_of(i, half);
#pragma unroll
      for (int j = 0; j < kMmaN; j += 2) {
        Pack<Out, 4> out;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float left = acc[i][j][2 * half + e], right = acc[i][j + 1][2 * half + e];
          const float other = __shfl_xor_sync(kAllLanes, odd ? left : right, 1);
          out.at[e] = convert<Out>(odd ? other : left);
          out.at[2 + e] = convert<Out>(odd ? right : other);
        }
        if (out_row) store_outputs(out_row + col + j * 8, out, columns - col - j * 8, aligned);
      }
    }
  }
}

// ---- the mask in blocks ----

// The word of query i whose bit j % 64 says whether key j of block key_block is visible.
__device__ __forceinline__ uint64_t mask_word(const MaskBlocks& mask, int64_t b, int64_t h, int64_t i, int key_block) {
  return mask.bits[b * mask.bits_strides.batch + h * mask.bits_strides.head + i * mask.bits_strides.row + key_block];
}

__device__ __forceinline__ BlockVisibility mask_block(const MaskBlocks& mask, int64_t b, int64_t h, int query_block,
                                                      int key_block) {
  return mask
      .map[b * mask.map_strides.batch + h * mask.map_strides.head + query_block * mask.map_strides.row + key_block];
}

// Keys of a block that any query of the key head sees; all of them where the mask differs by query.
__device__ __forceinline__ uint64_t key_word(const MaskBlocks& mask, int64_t b, int64_t head_kv, int key_block) {
  if (!mask.key_bits) return ~uint64_t{0};
  return mask.key_bits[b * mask.key_bits_batch_stride + head_kv * mask.key_bits_head_stride + key_block];
}

}  // namespace mha_ext
