// How the queries of a call are cut into tiles, and tiles into units of work for threads.
//
// The rows of a tile are queries of one key head: up to 64 of one query head, or, where a head has few, those of
// several heads of its group, so that keys are read once for all of them. A unit is a tile, or a part of the keys of
// one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "params.h"

namespace mha_ext::cpu {

constexpr int kTileRows = 64;
constexpr int kTileKeys = 96;                 // a multiple of the 6 keys of a micro-kernel; scores, K and V fit L2
constexpr int kScoreStride = kTileRows + 16;  // neighbouring keys in different cache sets
constexpr int kSplitKeys = 256;               // fewer keys are not worth a split of their own
constexpr int kWantedUnits = 32;              // keys are split where there are fewer tiles, whatever the threads
constexpr int kPartialHead = 3;  // an unfinished row in memory: max, sum, weighted, then its output that far

// The tiles of one key head of a sequence of seqlen_q queries.
struct HeadTiles {
  int heads_per_tile, head_blocks, query_blocks;

  HeadTiles(int64_t seqlen_q, int group) {
    const int64_t room = seqlen_q > 0 ? std::max<int64_t>(kTileRows / seqlen_q, 1) : group;
    heads_per_tile = static_cast<int>(std::min<int64_t>(group, room));
    head_blocks = (group + heads_per_tile - 1) / heads_per_tile;
    query_blocks = static_cast<int>((seqlen_q + kTileRows - 1) / kTileRows);
  }
  int64_t count() const { return int64_t{head_blocks} * query_blocks; }
};

struct Tile {
  int64_t batch;
  int head_kv, first_head, heads;  // query heads first_head .. first_head + heads - 1
  int first_query, queries;        // of each of them
  int64_t query_start, key_start;  // rows of the tensors ahead of the sequence: 0 unless packed
  int64_t seqlen_kv;

  int rows() const { return heads * queries; }
};

struct WorkPlan {
  int64_t tiles = 0;
  int splits = 1;                   // of the keys of each tile
  std::vector<int64_t> first_tile;  // packed: (batch + 1), the first tile of each sequence
  float* partial = nullptr;         // (tiles, splits, max_rows, partial_stride): unfinished rows where splits > 1
  int max_rows = 0, partial_stride = 0;
  const float* packed_values = nullptr;  // what Kernels::pack_values made, or null: each tile packs its own

  int64_t units() const { return tiles * splits; }
};

// Rows of a sequence in the tensors, clamped to them.
struct SequenceRows {
  int64_t start, length;
};

inline SequenceRows sequence_rows(const int32_t* cu_seqlens, int64_t b, int64_t total) {
  if (!cu_seqlens) return {0, total};
  const int64_t start = std::clamp<int64_t>(cu_seqlens[b], 0, total);
  return {start, std::clamp<int64_t>(cu_seqlens[b + 1], start, total) - start};
}

inline WorkPlan plan_tiles(const AttentionParams& params) {
  WorkPlan plan;
  const int group = params.num_heads_q / params.num_heads_kv;
  if (!params.cu_seqlens_q) {
    const HeadTiles head(params.seqlen_q, group);
    plan.tiles = params.batch * params.num_heads_kv * head.count();
    plan.max_rows = static_cast<int>(std::min<int64_t>(kTileRows, head.heads_per_tile * params.seqlen_q));
    return plan;
  }
  plan.max_rows = kTileRows;
  plan.first_tile.push_back(0);
  for (int64_t b = 0; b < params.batch; ++b) {
    const int64_t length = sequence_rows(params.cu_seqlens_q, b, params.seqlen_q).length;
    plan.tiles += params.num_heads_kv * HeadTiles(length, group).count();
    plan.first_tile.push_back(plan.tiles);
  }
  return plan;
}

// Tile `index` of a plan. Within a head the last queries come first: under a causal mask they see the most keys, and
// short tiles fill the gaps at the end.
inline Tile tile_at(const AttentionParams& params, const WorkPlan& plan, int64_t index) {
  const int group = params.num_heads_q / params.num_heads_kv;
  Tile tile = {};
  if (params.cu_seqlens_q) {
    const auto next = std::upper_bound(plan.first_tile.begin(), plan.first_tile.end(), index);
    tile.batch = next - plan.first_tile.begin() - 1;
    index -= plan.first_tile[tile.batch];
  }
  const SequenceRows queries = sequence_rows(params.cu_seqlens_q, tile.batch, params.seqlen_q);
  const HeadTiles head(queries.length, group);
  const int64_t key_head = index / head.count(), within = index % head.count();
  if (!params.cu_seqlens_q) tile.batch = key_head / params.num_heads_kv;
  const SequenceRows keys = sequence_rows(params.cu_seqlens_k, tile.batch, params.seqlen_kv);
  tile.head_kv = static_cast<int>(key_head % params.num_heads_kv);
  const int head_block = static_cast<int>(within / head.query_blocks);
  const int query_block = head.query_blocks - 1 - static_cast<int>(within % head.query_blocks);
  tile.first_head = tile.head_kv * group + head_block * head.heads_per_tile;
  tile.heads = std::min(head.heads_per_tile, group - head_block * head.heads_per_tile);
  tile.first_query = query_block * kTileRows;
  tile.queries = static_cast<int>(std::min<int64_t>(kTileRows, queries.length - tile.first_query));
  tile.query_start = queries.start;
  tile.key_start = keys.start;
  tile.seqlen_kv = keys.length;
  return tile;
}

}  // namespace mha_ext::cpu
