// Fused attention, backward, fp32 on the TF32 tensor cores: dK and dV (sm_80 and newer).
//
// A block owns kBlockN keys of one key head and walks over the queries that see them, head by head of its group: it
// works out S^T = K Q^T and P anew, dP^T = V dO^T and dS = P (dP - delta), and adds up dK += dS^T Q and dV += P^T dO.
#pragma once

#include "device/ptx/cp_async.h"
#include "device/warp.h"
#include "kernels/attention.h"
#include "kernels/attention_bwd_tf32_scores.cuh"
#include "kernels/attention_tf32.cuh"
#include "launch.h"

namespace mha_ext {

template <int kProducts_, int kHeadDim_>
struct AttentionDkDvTf32 {
  static constexpr int kProducts = kProducts_, kHeadDim = kHeadDim_;
  static constexpr AttentionTile kTile = attention_dkdv_tf32_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = threads(kTile);
  static constexpr int kWarpN = kBlockN / kTile.warps_m;
  static constexpr int kWarpCols = kHeadDim / kTile.warps_n;  // of dK and dV

  using Scores = ScoreTile<ScoreRows::kKeys, kWarpN / kFragmentRows, kBlockM / 8>;
  using QueryRows = PaddedTile<kBlockM, kHeadDim>;
  using KeyRows = PaddedTile<kBlockN, kHeadDim>;

  struct Shared {
    KeyRows k_smem, v_smem;
    QueryRows q_smem, do_smem;
    float2 row_stats_smem[kBlockM];
    float delta_smem[kBlockM];
  };

  static_assert(kWarpN % kFragmentRows == 0 && kWarpCols % kPartCols == 0 && kThreads >= kBlockM);
  static_assert(kMaskBlock % kBlockN == 0 && kMaskBlock % kBlockM == 0, "a tile lies within one block of the mask");
  static_assert(sizeof(Shared) <= kLeastSharedPerBlock);
  static_assert(kTile.blocks_per_sm * (sizeof(Shared) + 1024) <= kSharedPerSm);
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    attention_bwd_dkdv_tf32_kernel(const __grid_constant__ AttentionBackwardParams params,
                                   const __grid_constant__ TileOrder order, bool dk_aligned, bool dv_aligned) {
  using Scores = typename Config::Scores;
  using QueryRows = typename Config::QueryRows;
  using KeyRows = typename Config::KeyRows;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kProducts = Config::kProducts, kHeadDim = Config::kHeadDim;
  const AttentionParams& p = params.forward;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_n = warp / Config::kTile.warps_n * Config::kWarpN;
  const int warp_col = warp % Config::kTile.warps_n * Config::kWarpCols;

  // Which keys, which queries.
  const TileIndex tile = tile_index(blockIdx.x, order, p.cu_seqlens_k, p.seqlen_kv, p.batch, false);
  if (tile.tile < 0) return;
  const int batch = tile.batch, head_kv = tile.head, group = p.num_heads_q / p.num_heads_kv;
  const Sequence queries = sequence_of(p.cu_seqlens_q, p.seqlen_q, batch);
  const Sequence keys = sequence_of(p.cu_seqlens_k, p.seqlen_kv, batch);
  const int n_begin = tile.tile * kBlockN;
  const Band band = score_band(p.rule, batch, 0, keys.length);
  const VisibleRange visible = visible_queries(band, n_begin, n_begin + kBlockN - 1, queries.length);
  const int begin_tile = visible.first_tile(kBlockM), end_tile = visible.empty() ? 0 : visible.end_tile(kBlockM);
  const bool general = !has_plain_scores(p) || p.dropout.rng_state;

  // A step is a tile of queries of one of the group's heads.
  struct Step {
    int member, m_block;
  };
  const auto mask_at = [&](const Step& step) {
    const int query = step.m_block * kBlockM;  // of a tile that lies within one block of the mask
    return mask_of_tile(p.mask_blocks, batch, head_kv * group + step.member, 1, query, query, n_begin);
  };
  const auto next_visited = [&](Step step) {
    while (step.member < group) {
      if (step.m_block >= end_tile) {
        step = {step.member + 1, begin_tile};
        if (end_tile == 0) step.member = group;
      } else if (mask_at(step) == BlockVisibility::kNone) {
        ++step.m_block;
      } else {
        break;
      }
    }
    return step;
  };

  // From global to shared memory.
  const auto load_keys = [&](KeyRows& target, const void* tensor, const Strides3& strides, int head_dim) {
    const RowLoader<float, KeyRows, Config::kThreads> loader(sequence_rows(tensor, strides, batch, head_kv, keys),
                                                             strides.row, head_dim);
    load_visible_keys(loader, shared_address(target.bytes), n_begin, {0, band.key_end, 0, 0}, p.mask_blocks, batch,
                      head_kv);
  };
  const auto load_queries = [&](QueryRows& target, const void* tensor, const Strides3& strides, int head_dim,
                                const Step& step) {
    const RowLoader<float, QueryRows, Config::kThreads> loader(
        sequence_rows(tensor, strides, batch, head_kv * group + step.member, queries), strides.row, head_dim);
    const int first = step.m_block * kBlockM;
    if (first + kBlockM <= queries.length) {
      loader.load(shared_address(target.bytes), first);
    } else {
      loader.load_where(shared_address(target.bytes), first, [&](int row) { return first + row < queries.length; });
    }
  };
  const auto load_q = [&](const Step& step) {
    load_queries(shared.q_smem, p.query, p.query_strides, p.head_dim, step);
    ptx::cp_async_commit();
  };
  const auto load_do = [&](const Step& step) {
    load_queries(shared.do_smem, params.grad_output, params.grad_output_strides, p.head_dim_v, step);
    const int row = threadIdx.x, query = step.m_block * kBlockM + row;
    if (row < kBlockM) {
      const int64_t at =
          batch * p.row_batch_stride + (head_kv * group + step.member) * p.row_head_stride + queries.first + query;
      const bool exists = query < queries.length;
      ptx::cp_async<8>(shared_address(&shared.row_stats_smem[row]), p.row_stats + 2 * at, exists ? 8 : 0);
      ptx::cp_async<4>(shared_address(&shared.delta_smem[row]), params.delta + at, exists ? 4 : 0);
    }
    ptx::cp_async_commit();
  };

  Step step = next_visited({0, begin_tile});
  if (step.member < group) {
    load_keys(shared.k_smem, p.key, p.key_strides, p.head_dim);
    load_keys(shared.v_smem, p.value, p.value_strides, p.head_dim_v);
    load_q(step);
  }

  // Walk over the queries.
  const uint32_t k_address = fragment_address<Operand::kA>(shared.k_smem, warp_n, lane);
  const uint32_t v_address = fragment_address<Operand::kA>(shared.v_smem, warp_n, lane);
  const uint32_t q_address = fragment_address<Operand::kB>(shared.q_smem, 0, lane);
  const uint32_t do_address = fragment_address<Operand::kB>(shared.do_smem, 0, lane);
  const uint32_t q_rows_address = weighted_address(shared.q_smem, warp_col, lane);
  const uint32_t do_rows_address = weighted_address(shared.do_smem, warp_col, lane);
  float dk_acc[Scores::kMmaM][Config::kWarpCols / 8][4] = {};
  float dv_acc[Scores::kMmaM][Config::kWarpCols / 8][4] = {};
  const auto as_it_is = [](int) { return 1.0f; };
#pragma unroll 1
  while (step.member < group) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // queries are here, and nobody reads the last output gradients any more
    load_do(step);
    Scores scores, grads;
    score_product<kProducts, kHeadDim>(scores.acc, k_address, q_address, p.head_dim);

    ptx::cp_async_wait<0>();
    __syncthreads();  // output gradients are here
    score_product<kProducts, kHeadDim>(grads.acc, v_address, do_address, p.head_dim_v);
    const auto stats_of = [&](int q) {
      const int row = Scores::query_place(lane, q);
      const float2 kept = shared.row_stats_smem[row];
      return RowStats{kept.x, kept.y, shared.delta_smem[row]};
    };
    const bool has_bits = mask_at(step) == BlockVisibility::kSome;
    if (general || has_bits || !visible.is_full(step.m_block, kBlockM)) {
      const ScorePlace place{
          batch,   head_kv * group + step.member, step.m_block * kBlockM, n_begin + warp_n, queries.length, keys.length,
          has_bits};
      float no_slope;
      general_gradients(scores, grads, p, place, lane, stats_of, false, no_slope);
    } else {
      plain_gradients(scores, grads, p.scale, stats_of);
    }
    add_weighted_rows<kProducts, kHeadDim>(dk_acc, grads.acc, q_rows_address, p.head_dim - warp_col, as_it_is);

    const Step next = next_visited({step.member, step.m_block + 1});
    __syncthreads();  // nobody reads the queries any more
    if (next.member < group) load_q(next);
    add_weighted_rows<kProducts, kHeadDim>(dv_acc, scores.acc, do_rows_address, p.head_dim_v - warp_col, as_it_is);
    step = next;
  }

  // Store.
  const auto rows_of = [&](void* tensor, const Strides3& strides, int row) {
    return static_cast<float*>(tensor) + batch * strides.batch + head_kv * strides.head +
           (keys.first + n_begin + row) * strides.row + warp_col;
  };
  const float keep_scale = p.dropout.rng_state ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
#pragma unroll
  for (int k = 0; k < Scores::kKeys; ++k) {
    const int row = warp_n + Scores::key_place(lane, k);
    if (n_begin + row >= keys.length) continue;
    store_row(rows_of(params.grad_key, params.grad_key_strides, row), dk_acc[k / 2], k % 2, p.scale,
              p.head_dim - warp_col, dk_aligned, lane);
    store_row(rows_of(params.grad_value, params.grad_value_strides, row), dv_acc[k / 2], k % 2, keep_scale,
              p.head_dim_v - warp_col, dv_aligned, lane);
  }
}

// ---- the launcher ----

template <int kProducts, int kHeadDim>
void launch_attention_bwd_dkdv_tf32(const AttentionBackwardParams& params, cudaStream_t stream) {
  using Config = AttentionDkDvTf32<kProducts, kHeadDim>;
  const AttentionParams& p = params.forward;
  const int group = p.num_heads_q / std::max(p.num_heads_kv, 1);
  const int64_t pair_bytes = p.seqlen_q * (p.head_dim + p.head_dim_v) * int64_t{sizeof(float)} * group;
  const TileOrder order = tile_order(p.cu_seqlens_k, p.seqlen_kv, p.batch, p.num_heads_kv, Config::kBlockN, pair_bytes);
  const auto is_aligned = [](const void* base, const Strides3& strides) {
    return packs_align(base, DType::kFloat32, 4, strides.batch, strides.head, strides.row);
  };
  launch(attention_bwd_dkdv_tf32_kernel<Config>,
         {"attention_bwd_dkdv_tf32", order.blocks(), Config::kThreads, sizeof(typename Config::Shared), stream}, params,
         order, is_aligned(params.grad_key, params.grad_key_strides),
         is_aligned(params.grad_value, params.grad_value_strides));
}

}  // namespace mha_ext
