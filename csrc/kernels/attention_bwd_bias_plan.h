// How the gradient of a float attn_mask is cut into blocks, worked out on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile_config.h"
#include "params.h"

namespace mha_ext {

struct BiasGradPlan {
  int tiles_m, tiles_n;             // of one (batch, head) of the gradient
  int batches, heads, query_tiles;  // that share a tile of it
  int items;                        // all of these
  // Where tiles are few and items many, as for the windows of an image, several blocks share a tile: each adds up a
  // part of its items, and a pass over the parts adds these up.
  int parts;
  int64_t tiles;     // of all parts
  int64_t elements;  // of the gradient

  explicit BiasGradPlan(const AttentionBackwardParams& p) {
    const AttentionParams& f = p.forward;
    const BiasGradTile tile = bias_grad_tile(f.dtype == DType::kFloat32 ? 4 : 2);
    const bool repeats_rows = p.bias_rows == 1;
    const int all_tiles_m = static_cast<int>((f.seqlen_q + tile.block_m - 1) / tile.block_m);
    batches = static_cast<int>(f.batch / p.bias_batch);
    heads = static_cast<int>(f.num_heads_q / p.bias_heads);
    query_tiles = repeats_rows ? all_tiles_m : 1;
    items = batches * heads * query_tiles;
    tiles_m = repeats_rows ? 1 : all_tiles_m;
    tiles_n = static_cast<int>((f.seqlen_kv + tile.block_n - 1) / tile.block_n);

    const int64_t tiles_of_a_part = p.bias_batch * p.bias_heads * tiles_m * tiles_n;
    constexpr int64_t kWorthwhile = 4;  // items, before another block is started
    parts = static_cast<int>(std::clamp(2 * kFewTiles / std::max<int64_t>(tiles_of_a_part, 1), int64_t{1},
                                        std::max<int64_t>(items / kWorthwhile, 1)));
    tiles = parts * tiles_of_a_part;
    elements = p.bias_batch * p.bias_heads * p.bias_rows * f.seqlen_kv;
  }

  // Where the parts lie: none where there is one, the gradient itself.
  int64_t workspace_bytes() const { return parts > 1 ? parts * elements * int64_t{sizeof(float)} : 0; }
};

}  // namespace mha_ext
