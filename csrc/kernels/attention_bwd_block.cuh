// What a block of the 16-bit backward knows of its work, what it reads once, and what it leaves behind.
#pragma once

#include "kernels/attention_bwd_scores.cuh"
#include "kernels/attention_key_tile.cuh"

namespace mha_ext {

// What the host works out, once a launch.
struct AttentionBwdPlan {
  TileOrder order;
  uint32_t* ticket;
  uint32_t* turns;  // (heads, query_tiles, warps, parts), zero
  float4* sums;     // (heads, query_tiles, warps, parts, accumulator tiles, lanes)
  int query_tiles;
  float softcap, softcap_log2;                     // see GeneralTile
  bool query_aligned, key_aligned, value_aligned;  // rows of the gradients start on four elements
};

// Rows of a head of a (batch, head, row, col) tensor, from row `first` on.
template <typename T, typename Base>
__device__ __forceinline__ T* head_rows(Base* base, const Strides3& strides, int batch, int head, int first) {
  return static_cast<T*>(base) + batch * strides.batch + head * strides.head + first * strides.row;
}

// What all warps of a block ask for again and again. It lies in shared memory: registers belong to the accumulators.
template <typename Element>
struct BwdBlock {
  KeyTile tile;
  // Of the group's first head:
  const Element* query_rows;  // row 0
  const Element* grad_out_rows;
  const float2* stats_rows;
  const float* delta_rows;
  uint32_t first_slot;  // its first query tile among those of all heads
  uint32_t batch_head;  // as dropout numbers heads
  DropoutSeed seed;

  // One thread calls this.
  __device__ __forceinline__ void begin(const AttentionBackwardParams& p, const AttentionBwdPlan& plan, int number,
                                        int block_m) {
    const AttentionParams& f = p.forward;
    tile = KeyTile(f, plan.order, number);
    const int head = tile.head_of(0);
    query_rows = head_rows<const Element>(f.query, f.query_strides, tile.batch, head, tile.queries.first);
    grad_out_rows =
        head_rows<const Element>(p.grad_output, p.grad_output_strides, tile.batch, head, tile.queries.first);
    const int64_t row = tile.batch * f.row_batch_stride + head * f.row_head_stride + tile.queries.first;
    stats_rows = reinterpret_cast<const float2*>(f.row_stats) + row;
    delta_rows = p.delta + row;
    batch_head = static_cast<uint32_t>(tile.batch) * f.num_heads_q + head;
    first_slot = f.cu_seqlens_q ? head * plan.query_tiles + tile.queries.first / block_m + tile.batch
                                : batch_head * plan.query_tiles;
    if (f.dropout.rng_state) seed = dropout_seed(f.dropout.rng_state);
  }

  __device__ __forceinline__ GeneralTile general_tile(const QueryStep& step, const AttentionBwdPlan& plan,
                                                      bool slope_grad) const {
    GeneralTile scores;
    scores.batch = tile.batch;
    scores.head = tile.head_of(step.member);
    scores.batch_head = batch_head + step.member;
    scores.seqlen_q = tile.queries.length;
    scores.seqlen_kv = tile.keys.length;
    scores.band = tile.band;
    scores.outside = step.outside;
    scores.masked = step.masked;
    scores.slope_grad = slope_grad;
    scores.softcap = plan.softcap;
    scores.softcap_log2 = plan.softcap_log2;
    return scores;
  }
};

// ---- global to shared ----

// The block's keys and values; zeros in place of those that no query sees.
template <typename Config>
__device__ __forceinline__ void load_keys(typename Config::Shared& shared, const AttentionParams& p,
                                          const KeyTile& tile) {
  using Element = typename Config::Element;
  const typename Config::KeyLoader k_loader(
      head_rows<const Element>(p.key, p.key_strides, tile.batch, tile.head_kv, tile.keys.first), p.key_strides.row,
      p.head_dim);
  const typename Config::KeyLoader v_loader(
      head_rows<const Element>(p.value, p.value_strides, tile.batch, tile.head_kv, tile.keys.first),
      p.value_strides.row, p.head_dim_v);
  const VisibleRange range = visible_keys(tile.band, tile.queries.length);
  const auto seen = [&](int row) {
    const int key = tile.first + row;
    if (key < range.begin || key >= range.end) return false;
    return !Config::kGeneral ||
           (key_word(p.mask_blocks, tile.batch, tile.head_kv, key / kMaskBlock) >> (key % kMaskBlock) & 1) != 0;
  };
  k_loader.load_where(shared_address(shared.k_smem), tile.first, seen);
  v_loader.load_where(shared_address(shared.v_smem), tile.first, seen);
}

// ---- registers to global ----

// base: row 0 and column 0 of the warp's part; it has rows_left and columns_left from there on.
template <typename Element, int kMmaD>
__device__ __forceinline__ void store_gradients(float (&acc)[2][kMmaD][4], float scale, Element* base,
                                                int64_t row_stride, int rows_left, int columns_left, bool aligned,
                                                int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (float& x : acc[i][j]) x *= scale;
    }
  }
  store_rows<Element>(acc, columns_left, aligned, lane, [&](int i, int half) {
    const int row = 16 * i + 8 * half + lane / 4;
    return row < rows_left ? base + row * row_stride : nullptr;
  });
}

// dQ of queries that see no key: no step writes it. A tile of them is a warp's.
template <typename Config>
__device__ __forceinline__ void zero_unseen(const AttentionBackwardParams& p, const KeyTile& tile,
                                            const typename Config::Walk& walk, int warp, int lane) {
  using Element = typename Config::Element;
  const int tiles = (tile.queries.length + Config::kBlockM - 1) / Config::kBlockM;
  for (int index = warp; index < tile.group * tiles; index += Config::kWarps) {
    const int member = index / tiles, block = index % tiles, first = block * Config::kBlockM;
    if (!walk.is_unseen({member, block, false, false, {}})) continue;
    Element* const rows = head_rows<Element>(p.grad_query, p.grad_query_strides, tile.batch, tile.head_of(member),
                                             tile.queries.first + first);
    for (int row = 0; row < min(Config::kBlockM, tile.queries.length - first); ++row) {
      for (int col = lane; col < p.forward.head_dim; col += kWarpSize) {
        rows[row * p.grad_query_strides.row + col] = convert<Element>(0.0f);
      }
    }
  }
}

// ---- gradients of the slopes ----

// A key tile's part in the gradient of a head's slope.
__device__ __forceinline__ float* slope_part(const AttentionBackwardParams& p, const KeyTile& tile, int member,
                                             int index) {
  return p.grad_slopes + (int64_t{tile.batch} * p.forward.num_heads_q + tile.head_of(member)) * p.slope_partials +
         index;
}

// For heads that the tile does not visit, and for tiles that a short sequence does not have.
__device__ __forceinline__ void zero_slopes(const AttentionBackwardParams& p, const KeyTile& tile, int block_n) {
  for (int member = 0; member < tile.group; ++member) {
    if (threadIdx.x == 0) *slope_part(p, tile, member, tile.index) = 0;
    if (tile.index > 0) continue;
    const int tiles = max(1, (tile.keys.length + block_n - 1) / block_n);
    for (int index = tiles + static_cast<int>(threadIdx.x); index < p.slope_partials; index += blockDim.x) {
      *slope_part(p, tile, member, index) = 0;
    }
  }
}

}  // namespace mha_ext
