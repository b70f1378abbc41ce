// The forward's view of its work: the queries of a tile, and the key tiles that they visit.
#pragma once

#include "attention/key_range.h"
#include "kernels/attention_tiles.cuh"

namespace mha_ext {

// Worked out on the host, once a launch.
struct QueryTilePlan {
  TileOrder order;
  int pack;             // query heads of one key head whose rows share a tile: 1, or all of them
  int pack_reciprocal;  // of 2^16, rounded up
  bool output_aligned;  // rows start on four elements
};

// Packing pays where it saves a tenth of the tiles, as it does where a group fits in one: keys and values are then read
// once for all its heads. Not with dropout, which draws its numbers for 16 queries of one head.
inline bool packs_group(const AttentionParams& p, int block_m) {
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  if (group == 1 || group > block_m || p.dropout.rng_state) return false;
  const int64_t queries = p.cu_seqlens_q ? ceil_div(p.seqlen_q, p.batch) : p.seqlen_q;
  return 10 * ceil_div(queries, block_m / group) <= 9 * group * ceil_div(queries, block_m);
}

inline QueryTilePlan query_tile_plan(const AttentionParams& p, int block_m) {
  const bool packs = packs_group(p, block_m);
  const int group = p.num_heads_q / p.num_heads_kv;
  const int64_t keys_bytes = p.seqlen_kv * (p.head_dim + p.head_dim_v) * size_of(p.dtype);
  QueryTilePlan plan;
  plan.pack = packs ? group : 1;
  plan.pack_reciprocal = static_cast<int>(ceil_div(1 << 16, plan.pack));
  plan.order = tile_order(p.cu_seqlens_q, p.seqlen_q, p.batch, packs ? p.num_heads_kv : p.num_heads_q,
                          block_m / plan.pack, packs ? keys_bytes : ceil_div(keys_bytes, group));
  plan.output_aligned =
      packs_align(p.output, p.dtype, 4, p.output_strides.batch, p.output_strides.head, p.output_strides.row);
  return plan;
}

// Row r of a tile is query `first + r / pack` of head `head + r % pack`.
struct QueryTile {
  int batch, head, head_kv;
  Sequence queries, keys;
  int first, count;  // queries; count = 0: the tile is idle
  int pack, pack_reciprocal;
  Band band;           // of query `first`
  VisibleRange range;  // keys

  __device__ __forceinline__ QueryTile(const AttentionParams& p, const QueryTilePlan& plan)
      : pack(plan.pack), pack_reciprocal(plan.pack_reciprocal) {
    const TileIndex index = tile_index(blockIdx.x, plan.order, p.cu_seqlens_q, p.seqlen_q, p.batch, true);
    batch = index.batch;
    head = index.head * pack;
    head_kv = head / (p.num_heads_q / p.num_heads_kv);
    queries = sequence_of(p.cu_seqlens_q, p.seqlen_q, batch);
    keys = sequence_of(p.cu_seqlens_k, p.seqlen_kv, batch);
    first = index.tile * plan.order.block;
    count = index.tile < 0 ? 0 : min(plan.order.block, queries.length - first);
    band = score_band(p.rule, batch, first, keys.length);
    range = visible_keys(band, count);
  }

  // Queries of one head, of a tensor that is not packed.
  __device__ __forceinline__ QueryTile(const AttentionParams& p, int batch, int head, int first, int block)
      : batch(batch),
        head(head),
        head_kv(head / (p.num_heads_q / p.num_heads_kv)),
        queries{0, static_cast<int>(p.seqlen_q)},
        keys{0, static_cast<int>(p.seqlen_kv)},
        first(first),
        count(min(block, queries.length - first)),
        pack(1),
        pack_reciprocal(1 << 16),
        band(score_band(p.rule, batch, first, keys.length)),
        range(visible_keys(band, count)) {}

  __device__ __forceinline__ int rows() const { return count * pack; }
  __device__ __forceinline__ int query_of(int row) const { return row * pack_reciprocal >> 16; }  // rows below 256
  __device__ __forceinline__ int head_of(int row) const { return row - query_of(row) * pack; }

  // Whether some of the rows `row` .. `row + count - 1` sees some of the keys `key` .. `key + keys - 1`, by window.
  __device__ __forceinline__ bool sees(int row, int row_count, int key, int key_count) const {
    const int last = min(row + row_count, rows()) - 1;
    return last >= row && key + key_count > band.lower + query_of(row) && key < band.upper + query_of(last);
  }

  // Where a row lies in a (batch, head, row, col) or (batch, head, row) tensor.
  __device__ __forceinline__ int64_t offset(const Strides3& strides, int row) const {
    return batch * strides.batch + (head + head_of(row)) * strides.head +
           (int64_t{queries.first} + first + query_of(row)) * strides.row;
  }
};

// Copies the queries of a tile, whose rows may be of several heads, to Rows in shared memory; zeros beyond the last.
template <typename Element, typename Rows, int kThreads>
__device__ __forceinline__ void load_query_rows(uint32_t rows, const AttentionParams& p, const QueryTile& tile) {
  constexpr int kRowsPerPass = kThreads / Rows::kChunks;
  const int chunk = threadIdx.x % Rows::kChunks;
  const int head_bytes = p.head_dim * static_cast<int>(sizeof(Element));
  const int inside = min(max(head_bytes - chunk * kChunkBytes, 0), kChunkBytes);
#pragma unroll 4
  for (int row = threadIdx.x / Rows::kChunks; row < Rows::kRows; row += kRowsPerPass) {
    const bool exists = row < tile.rows();
    const auto* source = static_cast<const Element*>(p.query) + (exists ? tile.offset(p.query_strides, row) : 0);
    ptx::cp_async<kChunkBytes>(rows + Rows::offset(row, chunk),
                               reinterpret_cast<const char*>(source) + chunk * kChunkBytes, exists ? inside : 0);
  }
}

// A visited key tile.
struct KeyStep {
  int index;    // -1: there is none
  bool full;    // window and key length hide none of it
  bool masked;  // the bool mask hides some of it
};

// The key tiles that a query tile visits, from the last to the first.
template <int kBlockN, bool kGeneral>
struct KeyWalk {
  static_assert(!kGeneral || kBlockN == kMaskBlock, "the map says what a key tile shows");

  int first, first_full, end_full;  // tiles

  // What the map says of the 32 tiles from `window` on, a bit each.
  int window = 0;
  uint32_t visible = 0, shown = 0;

  // has_rows: of the warp that asks. Without rows it takes no tile for full, looks closer, and finds that it sees none.
  __device__ __forceinline__ KeyWalk(const VisibleRange& range, bool has_rows)
      : first(range.first_tile(kBlockN)),
        first_full(range.first_full_tile(kBlockN)),
        end_full(has_rows ? range.end_full_tile(kBlockN) : 0) {}

  // The last visited tile below `end`.
  __device__ __forceinline__ KeyStep before(int end, const QueryTile& tile, const MaskBlocks& mask) {
    KeyStep keys = {end - 1, false, false};
    if constexpr (kGeneral) {
      if (mask.map) {
        while (keys.index >= first && !in_map(keys, tile, mask)) {
        }
      }
    }
    if (keys.index < first) keys.index = -1;
    keys.full = keys.index >= first_full && keys.index < end_full;
    return keys;
  }

  // Moves keys to the last tile at or below it of which the mask shows something; else out of the window.
  __device__ __forceinline__ bool in_map(KeyStep& keys, const QueryTile& tile, const MaskBlocks& mask) {
    if (visible == 0 || keys.index < window) look_up(keys.index, tile, mask);
    const uint32_t left = visible << (window + kWarpSize - 1 - keys.index);
    if (left == 0) {
      keys.index = window - 1;
      visible = 0;
      return false;
    }
    keys.index -= __clz(left);
    keys.masked = (shown >> (keys.index - window) & 1) == 0;
    return true;
  }

  // The window that ends with tile `last`: a lane reads the map for one tile.
  __device__ __forceinline__ void look_up(int last, const QueryTile& tile, const MaskBlocks& mask) {
    window = last - (kWarpSize - 1);
    const int index = window + static_cast<int>(threadIdx.x % kWarpSize);
    bool some = false, all = true;
    if (index >= first) {
      const int heads = mask.map_strides.head ? tile.pack : 1;
      const int last_block = (tile.first + tile.count - 1) / kMaskBlock;
      for (int head = 0; head < heads; ++head) {
        for (int block = tile.first / kMaskBlock; block <= last_block; ++block) {
          const BlockVisibility shows = mask_block(mask, tile.batch, tile.head + head, block, index);
          some |= shows != BlockVisibility::kNone;
          all &= shows == BlockVisibility::kAll;
        }
      }
    }
    visible = __ballot_sync(kAllLanes, some);
    shown = __ballot_sync(kAllLanes, all);
  }
};

}  // namespace mha_ext
