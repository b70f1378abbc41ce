// What the gradient of attn_mask adds up, and its way to shared memory.
//
// An item is a query tile of one (batch, head). Its operands come in slices of 128 bytes of the head dimension: those
// of Q and K, then those of dO and V, through one pipeline whatever the head dimension is. a is the operand of queries,
// b that of keys.
#pragma once

#include "attention/key_range.h"
#include "kernels/attention_bwd_bias_plan.h"
#include "kernels/attention_tiles.cuh"

namespace mha_ext {

// Which tile of the gradient a block of threads owns, and which items it adds up.
struct BiasGradBlock {
  int batch, head, tile_m, n_begin;
  int part, item_begin, item_end;

  // Tiles of the same queries follow each other.
  static __device__ __forceinline__ BiasGradBlock of(int index, const AttentionBackwardParams& p,
                                                     const BiasGradPlan& plan) {
    const auto take = [&](int64_t count) {
      const int at = index % static_cast<int>(count);
      index /= static_cast<int>(count);
      return at;
    };
    BiasGradBlock block;
    block.n_begin = take(plan.tiles_n) * kMaskBlock;
    block.tile_m = take(plan.tiles_m);
    block.head = take(p.bias_heads);
    block.batch = take(p.bias_batch);
    block.part = index;
    block.item_begin = static_cast<int>(int64_t{plan.items} * index / plan.parts);
    block.item_end = static_cast<int>(int64_t{plan.items} * (index + 1) / plan.parts);
    return block;
  }
};

template <typename Element_, int kProducts_>
struct BiasGrad {
  using Element = Element_;
  static constexpr int kProducts = kProducts_;  // of TF32 parts
  static constexpr BiasGradTile kTile = bias_grad_tile(sizeof(Element));
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = threads(kTile);
  static constexpr int kWarpM = kBlockM / kTile.warps_m, kWarpN = kBlockN / kTile.warps_n;
  static constexpr int kMmaM = kWarpM / kFragmentRows, kMmaN = kWarpN / 8;
  static constexpr int kSliceBytes = 128;  // of the head dimension, in a stage
  static constexpr int kSlice = kSliceBytes / sizeof(Element);

  using TileA = SharedTile<kBlockM, kSliceBytes>;
  using TileB = SharedTile<kBlockN, kSliceBytes>;
  using Acc = float[kMmaM][kMmaN][4];

  struct Stage {
    unsigned char a_smem[TileA::kBytes];
    unsigned char b_smem[TileB::kBytes];
  };
  // A query tile of one head: what is added up.
  struct Item {
    int batch, head, first;  // batch = -1: there is none; `first` query
    bool masked;             // window or length hide a part of the tile, or it ends beyond the last query or key
    float2 stats[kBlockM];   // shift and log2 of the sum
    float delta[kBlockM];
  };
  struct Shared {
    Stage stage[kStages];
    Item item[2];  // the one in hand, and the next
    float key_sums[kTile.warps_m][kBlockN];
    BiasGradBlock block;  // here, as registers are short
  };

  static_assert(kBlockN == kMaskBlock, "a tile has one word of key bits");
  static_assert(kBlockM <= kThreads, "a thread copies what is known of one query");
  static_assert(kStages <= 3, "an item has two stages at least: copies are never further ahead than the next item");
};

// Walks over the items that see the block's keys, and copies them slice by slice, ahead of the products.
template <typename Config>
struct BiasGradLoader {
  using Element = typename Config::Element;
  using Shared = typename Config::Shared;

  int item;  // the end where item = item_end
  int batch, head, head_kv, first;
  int keys_begin, keys_end;  // seen by some query
  bool masked;               // see BiasGrad::Item
  int slice = 0;             // of Q and K, then of dO and V
  int parity = 0;            // of the items so far

  __device__ __forceinline__ BiasGradLoader(const Shared& shared, const AttentionParams& p, const BiasGradPlan& plan)
      : item(shared.block.item_begin - 1) {
    next_item(shared.block, p, plan);
  }

  __device__ __forceinline__ void next_item(const BiasGradBlock& block, const AttentionParams& p,
                                            const BiasGradPlan& plan) {
    const int n_begin = block.n_begin, n_end = n_begin + Config::kBlockN;
    while (++item < block.item_end) {
      const int tile = item % plan.query_tiles, rest = item / plan.query_tiles;
      first = (block.tile_m + tile) * Config::kBlockM;
      head = block.head + rest % plan.heads;
      head_kv = head / (p.num_heads_q / p.num_heads_kv);
      batch = block.batch + rest / plan.heads;
      const int queries = min(static_cast<int>(p.seqlen_q) - first, Config::kBlockM);
      const VisibleRange keys = visible_keys(score_band(p.rule, batch, first, p.seqlen_kv), queries);
      keys_begin = max(keys.begin, n_begin);
      keys_end = min(keys.end, n_end);
      masked = queries < Config::kBlockM || keys.full_begin > n_begin || keys.full_end < n_end;
      if (keys_begin < keys_end) return;
    }
  }

  // Copies the next slice, and with the first of an item what is known of its queries.
  __device__ __forceinline__ void load(Shared& shared, int stage, const AttentionBackwardParams& p,
                                       const BiasGradPlan& plan) {
    if (item < shared.block.item_end) {
      if (slice == 0) load_item(shared.item[parity], p);
      load_slice(shared.stage[stage], shared.block.n_begin, p);
      if (++slice == slices(p.forward.head_dim) + slices(p.forward.head_dim_v)) {
        slice = 0;
        parity ^= 1;
        next_item(shared.block, p.forward, plan);
      }
    } else if (slice++ == 0 && threadIdx.x == 0) {
      shared.item[parity].batch = -1;
    }
    ptx::cp_async_commit();
  }

  static __device__ __forceinline__ int slices(int head_dim) {
    return (head_dim + Config::kSlice - 1) / Config::kSlice;
  }

  __device__ __forceinline__ void load_item(typename Config::Item& target, const AttentionBackwardParams& p) const {
    const AttentionParams& f = p.forward;
    if (threadIdx.x == 0) {
      target.batch = batch;
      target.head = head;
      target.first = first;
      target.masked = masked;
    }
    const int row = threadIdx.x, i = first + row;
    if (row >= Config::kBlockM) return;
    const int64_t at = batch * f.row_batch_stride + head * f.row_head_stride + i;
    ptx::cp_async<8>(shared_address(&target.stats[row]), f.row_stats + 2 * at, i < f.seqlen_q ? 8 : 0);
    ptx::cp_async<4>(shared_address(&target.delta[row]), p.delta + at, i < f.seqlen_q ? 4 : 0);
  }

  __device__ __forceinline__ void load_slice(typename Config::Stage& stage, int n_begin,
                                             const AttentionBackwardParams& p) const {
    const AttentionParams& f = p.forward;
    const int slices_qk = slices(f.head_dim);
    const bool scores = slice < slices_qk;
    const int col = (scores ? slice : slice - slices_qk) * Config::kSlice;
    const int columns = (scores ? f.head_dim : f.head_dim_v) - col;
    const auto loader = [&](auto tile, const void* base, const Strides3& strides, int head) {
      const Element* from = static_cast<const Element*>(base) + batch * strides.batch + head * strides.head + col;
      return RowLoader<Element, decltype(tile), Config::kThreads>(from, strides.row, columns);
    };
    const auto a_loader = loader(typename Config::TileA{}, scores ? f.query : p.grad_output,
                                 scores ? f.query_strides : p.grad_output_strides, head);
    const auto b_loader =
        loader(typename Config::TileB{}, scores ? f.key : f.value, scores ? f.key_strides : f.value_strides, head_kv);
    const uint32_t a_tile = shared_address(stage.a_smem), b_tile = shared_address(stage.b_smem);
    if (!masked && !f.mask_blocks.key_bits) {
      a_loader.load(a_tile, first);
      b_loader.load(b_tile, n_begin);
      return;
    }
    // Keys that no query of the tile sees may hold NaN.
    const uint64_t seen = key_word(f.mask_blocks, batch, head_kv, n_begin / Config::kBlockN);
    a_loader.load_where(a_tile, first, [&](int row) { return first + row < f.seqlen_q; });
    b_loader.load_where(b_tile, n_begin, [&](int row) {
      return n_begin + row >= keys_begin && n_begin + row < keys_end && (seen >> row & 1) != 0;
    });
  }
};

}  // namespace mha_ext
