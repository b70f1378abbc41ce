// The backward's view of its work: the keys of a tile, and the query tiles that they visit.
#pragma once

#include "attention/key_range.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/ordered_sum.cuh"

namespace mha_ext {

// Keys `first` .. of a key head, and the query heads that share it.
struct KeyTile {
  int batch, head_kv, group;
  Sequence queries, keys;
  int index, first;      // index: of the tile in the sequence, -1: there is none
  Band band;             // of query 0
  VisibleRange visible;  // queries

  KeyTile() = default;

  // number: in the given order. A sequence without keys has one tile, an empty one.
  __device__ __forceinline__ KeyTile(const AttentionParams& p, const TileOrder& order, int number) {
    const TileIndex place = tile_index(number, order, p.cu_seqlens_k, p.seqlen_kv, p.batch, false);
    batch = place.batch;
    head_kv = place.head;
    group = p.num_heads_q / p.num_heads_kv;
    queries = sequence_of(p.cu_seqlens_q, p.seqlen_q, batch);
    keys = sequence_of(p.cu_seqlens_k, p.seqlen_kv, batch);
    index = place.tile;
    first = index * order.block;
    band = score_band(p.rule, batch, 0, keys.length);
    visible = visible_queries(band, first, first + order.block - 1, queries.length);
    if (visible.empty()) visible.begin = visible.end = 0;
  }

  __device__ __forceinline__ int head_of(int member) const { return head_kv * group + member; }
};

// Whether the sequences of a packed batch follow each other. Where they overlap, blocks would wait in vain for those of
// another sequence to add to dQ. The whole block calls this.
__device__ __forceinline__ bool all_in_order(const AttentionParams& p) {
  if (!p.cu_seqlens_q) return true;
  bool in_order = true;
  for (int64_t b = threadIdx.x; b < p.batch; b += blockDim.x) {
    in_order = in_order && p.cu_seqlens_q[b] <= p.cu_seqlens_q[b + 1] && p.cu_seqlens_k[b] <= p.cu_seqlens_k[b + 1];
  }
  return __syncthreads_and(in_order);
}

// A tile of queries that a key tile visits.
struct QueryStep {
  int member, block;  // head of the group; block = -1: there is none
  bool outside;       // window or lengths hide a part of the tile ...
  bool masked;        // ... or the bool mask does
  Turn turn;          // of the key tile among those that add to dQ
};

// Query tiles of a head that the map shows to a key tile: of 32 below `window`, a bit each, the last one first.
struct MapWindow {
  int window;
  uint32_t shown, full;
};

// The query tiles that a key tile visits, head after head, each from the last tile backwards: under a causal mask every
// key tile then begins at once, and those that go on longest are the first to add to a tile of dQ.
// A whole warp calls these together: where there is a map, every lane looks up a part.
template <int kBlockM, int kBlockN, bool kGeneral>
struct QueryWalk {
  static constexpr int kTileBlocks = kBlockN / kMaskBlock;
  static_assert(!kGeneral || kBlockM == kMaskBlock, "a row of the map says what query tiles show");

  const KeyTile& tile;
  const MaskBlocks& mask;

  __device__ __forceinline__ QueryStep first(MapWindow& map) const {
    QueryStep step = {0, tile.visible.end_tile(kBlockM), false, false, {}};
    map = {step.block + kWarpSize, 0, 0};
    return next(step, map);
  }

  __device__ __forceinline__ QueryStep next(QueryStep step, MapWindow& map) const {
    if (uses_map()) {
      next_in_map(step, map);
    } else if (--step.block < tile.visible.first_tile(kBlockM)) {
      ++step.member;
      step.block = tile.visible.end_tile(kBlockM) - 1;
    }
    if (step.member >= tile.group || tile.visible.empty()) return {step.member, -1, false, false, {}};
    const int first = step.block * kBlockM;
    step.outside = first < tile.visible.full_begin || min(first + kBlockM, tile.queries.length) > tile.visible.full_end;
    step.turn = turn_at(step);
    return step;
  }

  // Whether no key tile at all visits a query tile.
  __device__ __forceinline__ bool is_unseen(const QueryStep& step) const {
    const VisibleRange keys = keys_of(step.block);
    if (keys.empty()) return true;
    return uses_map() && visitors(step, keys.first_tile(kBlockN), keys.end_tile(kBlockN)) == 0;
  }

 private:
  struct Shown {
    bool any, all;
  };

  __device__ __forceinline__ bool uses_map() const { return kGeneral && mask.map; }

  // The keys that window and lengths show to a query tile.
  __device__ __forceinline__ VisibleRange keys_of(int block) const {
    const int first = block * kBlockM;
    const Band band{tile.band.lower + first, tile.band.upper + first, tile.band.key_end};
    return visible_keys(band, min(kBlockM, tile.queries.length - first));
  }

  __device__ __forceinline__ Turn turn_at(const QueryStep& step) const {
    const VisibleRange keys = keys_of(step.block);
    const int first = keys.first_tile(kBlockN), end = keys.end_tile(kBlockN);
    if (!uses_map()) return {static_cast<uint32_t>(tile.index - first), tile.index + 1 == end};
    return {visitors(step, first, tile.index), visitors(step, tile.index + 1, end) == 0};
  }

  __device__ __forceinline__ Shown look_at(int member, int block, int key_tile) const {
    Shown shown = {false, true};
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      const int key_block = key_tile * kTileBlocks + i;
      if (key_block * kMaskBlock >= tile.keys.length) break;
      const BlockVisibility shows = mask_block(mask, tile.batch, tile.head_of(member), block, key_block);
      shown.any |= shows != BlockVisibility::kNone;
      shown.all &= shows == BlockVisibility::kAll;
    }
    return shown;
  }

  __device__ __forceinline__ void next_in_map(QueryStep& step, MapWindow& map) const {
    const int begin = tile.visible.first_tile(kBlockM);
    while (map.shown == 0) {
      map.window -= kWarpSize;
      if (map.window <= begin) {
        if (++step.member >= tile.group) return;
        map.window = tile.visible.end_tile(kBlockM);
      }
      const int block = map.window - 1 - static_cast<int>(threadIdx.x % kWarpSize);
      Shown mine = {false, false};
      if (block >= begin) mine = look_at(step.member, block, tile.index);
      map.shown = __ballot_sync(kAllLanes, mine.any);
      map.full = __ballot_sync(kAllLanes, mine.all);
    }
    const int bit = __ffs(static_cast<int>(map.shown)) - 1;
    map.shown &= map.shown - 1;
    step.block = map.window - 1 - bit;
    step.masked = (map.full >> bit & 1) == 0;
  }

  // How many key tiles from first to end - 1 the map shows to a query tile.
  __device__ __forceinline__ uint32_t visitors(const QueryStep& step, int first, int end) const {
    uint32_t count = 0;
    for (int from = first; from < end; from += kWarpSize) {
      const int key_tile = from + static_cast<int>(threadIdx.x % kWarpSize);
      const bool visits = key_tile < end && look_at(step.member, step.block, key_tile).any;
      count += static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, visits)));
    }
    return count;
  }
};

}  // namespace mha_ext
