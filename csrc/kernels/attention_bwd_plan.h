// What the host works out for the 16-bit backward: which tile, and what lies where in the workspace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile_config.h"
#include "device/types.h"
#include "kernels/attention.h"
#include "kernels/attention_general.h"

namespace mha_ext {

// The width of the kernel that takes a call.
inline int attention_bwd_width(const AttentionParams& p) {
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  return head_dim <= 64 ? 64 : (head_dim <= 128 ? 128 : 256);
}

inline AttentionBwdTile attention_bwd_tile(const AttentionParams& p) {
  return attention_bwd_tile(attention_bwd_width(p), has_general_scores(p));
}

// A ticket, then whose turn it is to add to each part of dQ, then the sums. Both of these only where several tiles of
// keys may meet the same queries.
struct AttentionBwdWorkspace {
  int query_tiles;             // of a head; of a packed tensor: at most so many over all batches
  int64_t turns, sums, total;  // from which byte on

  explicit AttentionBwdWorkspace(const AttentionParams& p) {
    constexpr int64_t kAlignment = 256;
    const AttentionBwdTile tile = attention_bwd_tile(p);
    const bool packed = p.cu_seqlens_q;
    const int64_t heads = (packed ? 1 : p.batch) * p.num_heads_q;
    query_tiles = static_cast<int>(packed ? p.seqlen_q / tile.block_m + p.batch : ceil_div(p.seqlen_q, tile.block_m));
    const int64_t tiles = p.seqlen_kv > tile.block_n ? heads * query_tiles : 0;
    const int64_t turn_bytes = tiles * warps(tile) * tile.grad_parts * static_cast<int64_t>(sizeof(uint32_t));
    turns = kAlignment;
    sums = turns + ceil_div(turn_bytes, kAlignment) * kAlignment;
    total = sums + tiles * tile.block_m * attention_bwd_width(p) * static_cast<int64_t>(sizeof(float));
  }
};

}  // namespace mha_ext
