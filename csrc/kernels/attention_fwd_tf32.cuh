// Fused attention, forward, fp32 on the TF32 tensor cores: the scores never leave the registers (sm_80 and newer).
//
// A block owns kBlockM queries of one head, a warp 16 or 32 of them. It walks over the keys they see, kBlockN at a
// time: S = Q K^T, softmax relative to the largest score so far, O += P V. One tile of keys and one of values lie in
// shared memory; either is on its way while the other is multiplied.
#pragma once

#include "attention/online_softmax.h"
#include "device/ptx/math.h"
#include "device/warp.h"
#include "kernels/attention.h"
#include "kernels/attention_query_tile.cuh"
#include "kernels/attention_tf32.cuh"
#include "kernels/attention_tf32_scores.cuh"
#include "launch.h"

namespace mha_ext {

template <int kProducts_, int kHeadDim_>
struct AttentionFwdTf32 {
  static constexpr int kProducts = kProducts_, kHeadDim = kHeadDim_;
  static constexpr AttentionTile kTile = attention_fwd_tf32_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = threads(kTile);
  static constexpr int kWarpM = kBlockM / kTile.warps_m;

  using Scores = ScoreTile<ScoreRows::kQueries, kWarpM / kFragmentRows, kBlockN / 8>;
  using QueryRows = PaddedTile<kBlockM, kHeadDim>;
  using KeyRows = PaddedTile<kBlockN, kHeadDim>;

  struct Shared {
    QueryTile tile;
    QueryRows q_smem;
    KeyRows k_smem, v_smem;
    float moment[Scores::kQueries][kThreads];  // seldom wanted, and registers are short
  };

  static_assert(kTile.warps_n == 1 && kWarpM % kFragmentRows == 0);
  static_assert(kMaskBlock % kBlockN == 0, "a tile of keys lies within one block of the mask");
  static_assert(sizeof(Shared) <= kLeastSharedPerBlock);
  static_assert(kTile.blocks_per_sm * (sizeof(Shared) + 1024) <= kSharedPerSm);
};

// The softmax of a lane's rows so far. Sums are those of the lane's keys.
template <typename Scores>
struct Tf32Softmax {
  static constexpr int kQueries = Scores::kQueries;

  float max[kQueries];  // the largest score, in natural units
  float sum[kQueries];  // of e^t, t = score - softmax_shift(max)

  __device__ __forceinline__ Tf32Softmax() {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) max[q] = -kInfinity<float>, sum[q] = 0.0f;
  }

  // Takes in a tile of scores, given divided by `factor`, and turns it into e^t. What was summed up with earlier
  // weights must be multiplied by `rescale`. moment_of(q), where wanted, is the sum of t e^t.
  template <typename MomentOf>
  __device__ __forceinline__ void add(Scores& scores, float factor, bool with_moment, MomentOf moment_of,
                                      float (&rescale)[kQueries]) {
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
      float top = scores.at(q, 0);  // a NaN may get lost here: e^t will be NaN all the same
#pragma unroll
      for (int k = 1; k < Scores::kKeys; ++k) top = fmaxf(top, scores.at(q, k));
      top = quad_max(top) * factor;
      const float new_max = fmaxf(max[q], top), shift = softmax_shift(new_max);
      const float step = max[q] - shift;
      max[q] = new_max;
      rescale[q] = ptx::ex2(step * kLog2E);
      if (with_moment) {
        float moment = sum[q] > 0 ? rescale[q] * (moment_of(q) + step * sum[q]) : 0.0f;
#pragma unroll
        for (int k = 0; k < Scores::kKeys; ++k) {
          const float t = scores.at(q, k) * factor - shift, exponential = ptx::ex2(t * kLog2E);
          if (exponential > 0) moment += t * exponential;
        }
        moment_of(q) = moment;
      }
      sum[q] *= rescale[q];
#pragma unroll
      for (int k = 0; k < Scores::kKeys; ++k) {
        scores.at(q, k) = ptx::ex2((scores.at(q, k) * factor - shift) * kLog2E);
        sum[q] += scores.at(q, k);
      }
    }
  }
};

// Products become scores, in natural units unless they are plain, and -inf where a key is hidden. row: the warp's
// first, n_begin the tile's first key. has_bits: the bool mask hides some of the tile.
template <typename Scores>
__device__ __forceinline__ void apply_rule(Scores& scores, const AttentionParams& p, const QueryTile& tile, int row,
                                           int n_begin, bool has_bits, int lane) {
  const BatchRule rule(p, tile.batch, tile.keys.length);
  const bool plain = has_plain_scores(p);
  const int lane_key = n_begin + Scores::key_place(lane, 0);
#pragma unroll
  for (int q = 0; q < Scores::kQueries; ++q) {
    // Beyond the last row stands the last: nobody reads what comes of it.
    const int existing = min(row + Scores::query_place(lane, q), tile.rows() - 1);
    const int head = tile.head + tile.head_of(existing), query = tile.first + tile.query_of(existing);
    const RowRule<float> row_rule = rule.row(head, query);
    if (!plain) {
#pragma unroll
      for (int k = 0; k < Scores::kKeys; ++k) {
        const int key = lane_key + Scores::key_place(0, k);
        if (row_rule.in_bounds(key)) scores.at(q, k) = rule.score(row_rule, scores.at(q, k), key);
      }
    }
    uint64_t seen = ~uint64_t{0};
    if (has_bits) seen = mask_bits(p.mask_blocks, tile.batch, head, query, n_begin) >> Scores::key_place(lane, 0);
#pragma unroll
    for (int k = 0; k < Scores::kKeys; ++k) {
      const int step = Scores::key_place(0, k);
      scores.at(q, k) = masked(scores.at(q, k), row_rule.in_bounds(lane_key + step) && (seen >> step & 1));
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    attention_fwd_tf32_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ QueryTilePlan plan) {
  using Scores = typename Config::Scores;
  using KeyRows = typename Config::KeyRows;
  constexpr int kBlockN = Config::kBlockN, kProducts = Config::kProducts, kHeadDim = Config::kHeadDim;
  constexpr int kQueries = Scores::kQueries;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp * Config::kWarpM;

  // Which queries, which keys.
  if (threadIdx.x == 0) shared.tile = QueryTile(p, plan);
  __syncthreads();
  const QueryTile& tile = shared.tile;
  if (tile.count == 0) return;
  const VisibleRange visible = tile.range;
  const int end_tile = visible.empty() ? 0 : visible.end_tile(kBlockN);
  const bool plain = has_plain_scores(p);

  const auto mask_at = [&](int n_block) {
    return mask_of_tile(p.mask_blocks, tile.batch, tile.head, tile.pack, tile.first, tile.first + tile.count - 1,
                        n_block * kBlockN);
  };
  const auto next_visited = [&](int n_block) {
    while (n_block < end_tile && mask_at(n_block) == BlockVisibility::kNone) ++n_block;
    return n_block;
  };

  // From global to shared memory. Loaders are made where they are needed: registers are short.
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
    load_query_rows<float, typename Config::QueryRows, Config::kThreads>(shared_address(shared.q_smem.bytes), p, tile);
    load_k(n_block);
  }

  // Walk over the keys.
  const uint32_t q_address = fragment_address<Operand::kA>(shared.q_smem, warp_m, lane);
  const uint32_t k_address = fragment_address<Operand::kB>(shared.k_smem, 0, lane);
  const uint32_t v_address = weighted_address(shared.v_smem, 0, lane);
  float out_acc[Scores::kMmaM][kHeadDim / 8][4] = {};
  Tf32Softmax<Scores> softmax;
  const auto moment_of = [&](int q) -> float& { return shared.moment[q][threadIdx.x]; };
  if (p.entropy) {
    for (int q = 0; q < kQueries; ++q) moment_of(q) = 0.0f;
  }
#pragma unroll 1
  while (n_block < end_tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // keys are here, and nobody reads the last values any more
    load_v(n_block);

    Scores scores;
    score_product<kProducts, kHeadDim>(scores.acc, q_address, k_address, p.head_dim);
    const int n_begin = n_block * kBlockN;
    const bool has_bits = mask_at(n_block) == BlockVisibility::kSome;
    if (!plain || has_bits || !visible.is_full(n_block, kBlockN)) {
      apply_rule(scores, p, tile, warp_m, n_begin, has_bits, lane);
    }
    float rescale[kQueries];
    softmax.add(scores, plain ? p.scale : 1.0f, p.entropy, moment_of, rescale);
    if (p.dropout.rng_state) {
      visit_dropout<Scores>(p.dropout, tile.batch * p.num_heads_q + tile.head, tile.first + warp_m, n_begin, lane,
                            [&](int query, int key, bool keep) {
                              if (!keep) scores.at(query, key) = 0.0f;
                            });
    }

    const int next_block = next_visited(n_block + 1);
    ptx::cp_async_wait<0>();
    __syncthreads();  // values are here, and nobody reads the keys any more
    if (next_block < end_tile) load_k(next_block);
    add_weighted_rows<kProducts, kHeadDim>(out_acc, scores.acc, v_address, p.head_dim_v,
                                           [&](int row) { return rescale[row]; });
    n_block = next_block;
  }

  // Divide by the sums, store.
  const Strides3 row_strides = {p.row_batch_stride, p.row_head_stride, 1};
  const float keep_scale = p.dropout.rng_state ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
#pragma unroll
  for (int q = 0; q < kQueries; ++q) {
    const int row = warp_m + Scores::query_place(lane, q), existing = min(row, tile.rows() - 1);
    const float sink = row_sink<float>(p.rule, tile.head + tile.head_of(existing));
    const float max = softmax.max[q], sum = quad_sum(softmax.sum[q]);
    const float moment = p.entropy ? quad_sum(moment_of(q)) : 0.0f;
    const bool none = sum == 0.0f;
    const float shift = softmax_shift(max_or_nan(max, sink));
    const float keys = ptx::ex2((max - shift) * kLog2E);  // from their own shift to the common one
    const float total = sum * keys + ptx::ex2((sink - shift) * kLog2E);
    if (row != existing) continue;

    if (none) clear_row(out_acc[q / 2], q % 2);
    store_row(static_cast<float*>(p.output) + tile.offset(p.output_strides, row), out_acc[q / 2], q % 2,
              none ? 0.0f : keys / total * keep_scale, p.head_dim_v, plan.output_aligned, lane);
    if (lane % 4 != 0) continue;
    const int64_t at = tile.offset(row_strides, row);
    p.lse[at] = shift + std::log(total);
    if (p.row_stats) {
      reinterpret_cast<float2*>(p.row_stats)[at] = make_float2(none ? 0.0f : shift, none ? 0.0f : std::log2(total));
    }
    if (p.max_score) p.max_score[at] = sum != sum && max != kInfinity<float> ? kNaN<float> : max;
    if (p.entropy) {  // -sum w log w with w = e^t / total
      const float common_moment = keys * (moment + (max - shift) * sum);
      const float entropy = (std::log(total) * sum * keys - common_moment) / total;
      p.entropy[at] = none ? 0.0f : entropy;
    }
  }
}

// ---- the launcher ----

template <int kProducts, int kHeadDim>
void launch_attention_fwd_tf32(const AttentionParams& p, cudaStream_t stream) {
  using Config = AttentionFwdTf32<kProducts, kHeadDim>;
  if (p.batch <= 0 || p.num_heads_q <= 0 || p.seqlen_q <= 0) return;
  const QueryTilePlan plan = query_tile_plan(p, Config::kBlockM);
  launch(attention_fwd_tf32_kernel<Config>,
         {"attention_fwd_tf32", plan.order.blocks(), Config::kThreads, sizeof(typename Config::Shared), stream}, p,
         plan);
}

}  // namespace mha_ext
