// Fused attention, backward, fp32 on the TF32 tensor cores: dQ, and the gradients of the ALiBi slopes (sm_80 and
// newer).
//
// A block owns kBlockM queries of one head and walks over the keys they see, as the forward does: it works out S and P
// anew, dP = dO V^T and dS = P (dP - delta), and adds up dQ += dS K. dK and dV have a kernel of their own, which works
// out the same once more: two products of seven, and the result does not depend on the order of blocks.
#pragma once

#include "device/warp.h"
#include "kernels/attention.h"
#include "kernels/attention_bwd_tf32_scores.cuh"
#include "kernels/attention_query_tile.cuh"
#include "kernels/attention_tf32.cuh"
#include "launch.h"

namespace mha_ext {

template <int kProducts_, int kHeadDim_>
struct AttentionDqTf32 {
  static constexpr int kProducts = kProducts_, kHeadDim = kHeadDim_;
  static constexpr AttentionTile kTile = attention_dq_tf32_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = threads(kTile);
  static constexpr int kWarpM = kBlockM / kTile.warps_m;
  static constexpr int kWarpCols = kHeadDim / kTile.warps_n;  // of dQ

  using Scores = ScoreTile<ScoreRows::kQueries, kWarpM / kFragmentRows, kBlockN / 8>;
  using QueryRows = PaddedTile<kBlockM, kHeadDim>;
  using KeyRows = PaddedTile<kBlockN, kHeadDim>;

  struct Shared {
    QueryRows q_smem, do_smem;
    KeyRows k_smem, v_smem;
  };

  static_assert(kWarpM % kFragmentRows == 0 && kWarpCols % kPartCols == 0);
  static_assert(kMaskBlock % kBlockN == 0, "a tile of keys lies within one block of the mask");
  static_assert(sizeof(Shared) <= kLeastSharedPerBlock);
  static_assert(kTile.blocks_per_sm * (sizeof(Shared) + 1024) <= kSharedPerSm);
};

// A tile's part in the gradient of its head's slope. The first tile also writes those that a short sequence has not.
template <int kThreads>
__device__ __forceinline__ void store_slope_part(const AttentionBackwardParams& p, const QueryTile& tile, int block_m,
                                                 float slope_sum, float* scratch) {
  slope_sum = group_sum<kThreads / kWarpSize>(slope_sum, scratch);
  float* const parts = p.grad_slopes + (int64_t{tile.batch} * p.forward.num_heads_q + tile.head) * p.slope_partials;
  if (threadIdx.x == 0) parts[tile.first / block_m] = slope_sum;
  if (tile.first > 0) return;
  const int tiles = max((tile.queries.length + block_m - 1) / block_m, 1);
  for (int part = tiles + static_cast<int>(threadIdx.x); part < p.slope_partials; part += kThreads) parts[part] = 0.0f;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    attention_bwd_dq_tf32_kernel(const __grid_constant__ AttentionBackwardParams params,
                                 const __grid_constant__ QueryTilePlan plan) {
  using Scores = typename Config::Scores;
  using QueryRows = typename Config::QueryRows;
  using KeyRows = typename Config::KeyRows;
  constexpr int kBlockN = Config::kBlockN, kProducts = Config::kProducts, kHeadDim = Config::kHeadDim;
  constexpr int kQueries = Scores::kQueries;
  const AttentionParams& p = params.forward;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp / Config::kTile.warps_n * Config::kWarpM;
  const int warp_col = warp % Config::kTile.warps_n * Config::kWarpCols;

  // Which queries, which keys.
  const QueryTile tile(p, plan);
  if (tile.first < 0) return;
  const VisibleRange& visible = tile.range;
  const int end_tile = visible.empty() || tile.count == 0 ? 0 : visible.end_tile(kBlockN);
  const bool general = !has_plain_scores(p) || p.dropout.rng_state;

  const auto mask_at = [&](int n_block) {
    return mask_of_tile(p.mask_blocks, tile.batch, tile.head, 1, tile.first, tile.first + tile.count - 1,
                        n_block * kBlockN);
  };
  const auto next_visited = [&](int n_block) {
    while (n_block < end_tile && mask_at(n_block) == BlockVisibility::kNone) ++n_block;
    return n_block;
  };

  // From global to shared memory.
  const auto load_queries = [&](QueryRows& target, const void* tensor, const Strides3& strides, int head_dim) {
    const RowLoader<float, QueryRows, Config::kThreads> loader(
        sequence_rows(tensor, strides, tile.batch, tile.head, tile.queries), strides.row, head_dim);
    loader.load_where(shared_address(target.bytes), tile.first, [&](int row) { return row < tile.count; });
  };
  const auto load_keys = [&](KeyRows& target, const void* tensor, const Strides3& strides, int head_dim, int n_block) {
    const RowLoader<float, KeyRows, Config::kThreads> loader(
        sequence_rows(tensor, strides, tile.batch, tile.head_kv, tile.keys), strides.row, head_dim);
    load_visible_keys(loader, shared_address(target.bytes), n_block * kBlockN, visible, p.mask_blocks, tile.batch,
                      tile.head_kv);
    ptx::cp_async_commit();
  };
  const auto load_k = [&](int n_block) { load_keys(shared.k_smem, p.key, p.key_strides, p.head_dim, n_block); };
  const auto load_v = [&](int n_block) { load_keys(shared.v_smem, p.value, p.value_strides, p.head_dim_v, n_block); };

  int n_block = next_visited(visible.first_tile(kBlockN));
  if (n_block < end_tile) {
    load_queries(shared.q_smem, p.query, p.query_strides, p.head_dim);
    load_queries(shared.do_smem, params.grad_output, params.grad_output_strides, p.head_dim_v);
    load_v(n_block);
  }

  // What is known of this lane's queries; those that do not exist see nothing.
  const int64_t first_row =
      tile.batch * p.row_batch_stride + tile.head * p.row_head_stride + tile.queries.first + tile.first + warp_m;
  RowStats stats[kQueries];
#pragma unroll
  for (int q = 0; q < kQueries; ++q) {
    const int row = Scores::query_place(lane, q);
    stats[q] = {};
    if (warp_m + row < tile.count) {
      const int64_t at = first_row + row;
      stats[q] = {p.row_stats[2 * at], p.row_stats[2 * at + 1], params.delta[at]};
    }
  }

  // Walk over the keys.
  const uint32_t q_address = fragment_address<Operand::kA>(shared.q_smem, warp_m, lane);
  const uint32_t do_address = fragment_address<Operand::kA>(shared.do_smem, warp_m, lane);
  const uint32_t k_address = fragment_address<Operand::kB>(shared.k_smem, 0, lane);
  const uint32_t v_address = fragment_address<Operand::kB>(shared.v_smem, 0, lane);
  const uint32_t k_rows_address = weighted_address(shared.k_smem, warp_col, lane);
  float dq_acc[Scores::kMmaM][Config::kWarpCols / 8][4] = {};
  float slope_sum = 0.0f;
#pragma unroll 1
  while (n_block < end_tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // values are here, and nobody reads the last keys any more
    load_k(n_block);
    Scores scores, grads;
    score_product<kProducts, kHeadDim>(grads.acc, do_address, v_address, p.head_dim_v);

    const int next_block = next_visited(n_block + 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // keys are here, and nobody reads the values any more
    if (next_block < end_tile) load_v(next_block);
    score_product<kProducts, kHeadDim>(scores.acc, q_address, k_address, p.head_dim);

    const bool has_bits = mask_at(n_block) == BlockVisibility::kSome;
    const auto stats_of = [&](int q) { return stats[q]; };
    if (general || has_bits || !visible.is_full(n_block, kBlockN)) {
      const ScorePlace place{tile.batch,       tile.head, tile.first + warp_m, n_block * kBlockN, tile.queries.length,
                             tile.keys.length, has_bits};
      general_gradients(scores, grads, p, place, lane, stats_of, params.grad_slopes, slope_sum);
    } else {
      plain_gradients(scores, grads, p.scale, stats_of);
    }
    add_weighted_rows<kProducts, kHeadDim>(dq_acc, grads.acc, k_rows_address, p.head_dim - warp_col,
                                           [](int) { return 1.0f; });
    n_block = next_block;
  }

  // Store.
  const Strides3& strides = params.grad_query_strides;
  float* const grad_query =
      static_cast<float*>(params.grad_query) + tile.batch * strides.batch + tile.head * strides.head;
#pragma unroll
  for (int q = 0; q < kQueries; ++q) {
    const int row = warp_m + Scores::query_place(lane, q);
    if (row >= tile.count) continue;
    store_row(grad_query + (tile.queries.first + tile.first + row) * strides.row + warp_col, dq_acc[q / 2], q % 2,
              p.scale, p.head_dim - warp_col, plan.output_aligned, lane);
  }
  if (params.grad_slopes) {
    if (warp_col > 0) slope_sum = 0.0f;                                   // of the same scores as another warp's
    auto* const scratch = reinterpret_cast<float*>(shared.v_smem.bytes);  // nobody reads the last values any more
    store_slope_part<Config::kThreads>(params, tile, Config::kBlockM, slope_sum, scratch);
  }
}

// ---- the launcher ----

template <int kProducts, int kHeadDim>
void launch_attention_bwd_dq_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  using Config = AttentionDqTf32<kProducts, kHeadDim>;
  const AttentionParams& p = params.forward;
  const Strides3& strides = params.grad_query_strides;
  const int64_t key_bytes = p.seqlen_kv * (p.head_dim + p.head_dim_v) * int64_t{sizeof(float)};
  QueryTilePlan plan;  // heads are not packed: a part of a slope's gradient is of one head
  plan.pack = 1;
  plan.pack_reciprocal = 1 << 16;
  plan.order = tile_order(p.cu_seqlens_q, p.seqlen_q, p.batch, p.num_heads_q, Config::kBlockM,
                          key_bytes * p.num_heads_kv / std::max(p.num_heads_q, 1));
  plan.output_aligned = packs_align(params.grad_query, DType::kFloat32, 4, strides.batch, strides.head, strides.row);
  launch(attention_bwd_dq_tf32_kernel<Config>,
         {"attention_bwd_dq_tf32", plan.order.blocks(), Config::kThreads, sizeof(typename Config::Shared), stream},
         params, plan);
}

}  // namespace mha_ext
