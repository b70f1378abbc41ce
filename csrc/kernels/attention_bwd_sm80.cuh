// Fused attention, backward, 16-bit: mma.sync fed by cp.async (sm_80 and newer).
//
// A block owns a tile of keys and walks over the tiles of queries that see it, for every query head of the group, from
// the last to the first. Transposed (a row is a key, a column a query), a step is
//
//   S  = K Q^T       P  = exp(S - lse)        dV += P dO
//   dP = V dO^T      dS = P (dP - delta)      dK += dS Q      dQ += dS^T K
//
// dV and dK stay in registers to the end. dQ belongs to all tiles of keys that the queries see: their blocks add to it
// in turn, through global memory, see ordered_sum.cuh.
//
// A warp has kWarpN keys by kWarpM queries of S and dP, but of dV and dK its keys by a share of the columns, so that
// nobody adds up what others have. P and dS of its own queries it then has in registers, where the accumulators of one
// product are the operand of the next; those of other warps come through shared memory, where dQ finds dS as well.
#pragma once

#include <algorithm>

#include "device/ptx/mma.h"
#include "kernels/attention.h"
#include "kernels/attention_bwd_block.cuh"
#include "kernels/attention_bwd_plan.h"
#include "launch.h"

namespace mha_ext {

template <typename Element_, int kHeadDim_, bool kGeneral_>
struct AttentionBwd {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // of queries and keys as of values; smaller ones are filled with zeros
  static constexpr bool kGeneral = kGeneral_;
  static constexpr AttentionBwdTile kTile = attention_bwd_tile(kHeadDim, kGeneral);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kWarpsM = kTile.warps_m, kWarps = warps(kTile), kThreads = kWarps * kWarpSize;

  // A warp's part of S and dP (kWarpN x kWarpM), of dK and dV (kWarpN x kWarpD), and of dQ (kGradM x kGradD, in
  // kGradParts), in mma tiles of 16 x 8.
  static constexpr int kWarpN = kBlockN / kTile.warps_n, kWarpM = kBlockM / kWarpsM, kWarpD = kHeadDim / kWarpsM;
  static constexpr int kGradM = 32, kGradWarpsD = kWarps * kGradM / kBlockM, kGradParts = kTile.grad_parts;
  static constexpr int kGradD = kHeadDim / kGradWarpsD, kPartD = kGradD / kGradParts;
  static constexpr int kScoreParts = kTile.score_parts;
  // P and dS of a warp's own queries stay in registers. Where they are a quarter of what dK and dV need, or general
  // scores ask for registers, it reads its own from shared memory as well.
  static constexpr bool kKeepsOwn = !kGeneral && kWarpsM == 2;
  static constexpr int kFirstOther = kKeepsOwn ? 1 : 0;  // warps warp_m ^ kFirstOther, ... are read so
  static constexpr int kMmaM = kWarpM / kScoreParts / 8, kMmaD = kWarpD / 8, kMmaPart = kPartD / 8;

  static constexpr int kRowBytes = kHeadDim * sizeof(Element);
  using KeyRows = SharedTile<kBlockN, kRowBytes>;
  using QueryRows = SharedTile<kBlockM, kRowBytes>;
  using ScoreRows = SharedTile<kBlockN, kBlockM * sizeof(Element)>;
  using KeyLoader = RowLoader<Element, KeyRows, kThreads>;
  using QueryLoader = RowLoader<Element, QueryRows, kThreads>;
  using Walk = QueryWalk<kBlockM, kBlockN, kGeneral>;

  struct Stage {
    unsigned char q_smem[QueryRows::kBytes];
    unsigned char grad_out_smem[QueryRows::kBytes];
  };
  struct Shared {
    unsigned char k_smem[KeyRows::kBytes];
    unsigned char v_smem[KeyRows::kBytes];
    Stage stage[kStages];
    unsigned char p_smem[ScoreRows::kBytes];
    unsigned char ds_smem[ScoreRows::kBytes];
    QueryStats<kBlockM> stats;
    BwdBlock<Element> block;
    QueryStep steps[4];  // by turns: this one, the next, the one after that
    MapWindow map;
    float slope_smem[kWarps];
  };

  // Steps of 32 bytes of which a reader of so many columns keeps the addresses.
  static constexpr int steps(int columns) { return columns < 64 ? columns / 16 : 4; }

  static_assert(kWarpN == 32 && kWarpM % 16 == 0 && kWarpD % 16 == 0 && kPartD % 16 == 0);
  static_assert(chunks_flip<Swizzle::kChunkColumn, kRowBytes>() &&
                chunks_flip<Swizzle::kChunkColumn, ScoreRows::kRowBytes>());
  static_assert(sizeof(Shared) + 1024 <= kSharedPerSm);
};

// ---- products ----

// acc += rows of a times rows of b, in steps of 16 columns.
template <typename Element, int kSteps, int kMmaM, typename ReaderA, typename ReaderB>
__device__ __forceinline__ void multiply_rows(float (&acc)[2][kMmaM][4], const ReaderA& a_reader, uint32_t a_tile,
                                              const ReaderB& b_reader, int b_row_step, uint32_t b_tile) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) a_reader.read(a[i], i, step, a_tile);
#pragma unroll
    for (int j = 0; j < kMmaM; j += 2) {
      uint32_t b[4];
      b_reader.read(b, b_row_step + j / 2, step, b_tile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_m16n8<Element>(acc[i][j], a[i], b[0], b[1]);
        ptx::mma_m16n8<Element>(acc[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// acc += a times 16 rows of a tile, from row 16 row_step on.
template <typename Element, int kMmaD, typename Reader>
__device__ __forceinline__ void multiply_columns(float (&acc)[2][kMmaD][4], const uint32_t (&a)[2][4],
                                                 const Reader& reader, int row_step, uint32_t tile, uint32_t flip = 0) {
#pragma unroll
  for (int j = 0; j < kMmaD; j += 2) {
    uint32_t b[4];
    reader.read(b, row_step, j / 2, tile, flip);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_m16n8<Element>(acc[i][j], a[i], b[0], b[1]);
      ptx::mma_m16n8<Element>(acc[i][j + 1], a[i], b[2], b[3]);
    }
  }
}

// ---- the kernel ----

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_bwd_sm80_kernel(const __grid_constant__ AttentionBackwardParams p,
                              const __grid_constant__ AttentionBwdPlan plan) {
  using Element = typename Config::Element;
  using KeyRows = typename Config::KeyRows;
  using QueryRows = typename Config::QueryRows;
  using ScoreRows = typename Config::ScoreRows;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kStages = Config::kStages;
  constexpr int kWarpN = Config::kWarpN, kWarpM = Config::kWarpM, kWarpD = Config::kWarpD;
  constexpr int kMmaM = Config::kMmaM, kMmaD = Config::kMmaD, kSteps = Config::kRowBytes / kFragmentBytes;

  const AttentionParams& f = p.forward;
  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);
  const int warp_n = warp / Config::kWarpsM, warp_m = warp % Config::kWarpsM;
  const int grad_row = warp / Config::kGradWarpsD * Config::kGradM;
  const int grad_col = warp % Config::kGradWarpsD * Config::kGradD;

  // Which keys. Blocks take numbers as they begin: each waits for lower ones only, and those are running.
  const bool in_order = all_in_order(f);
  if (threadIdx.x == 0) {
    shared.block.begin(p, plan, static_cast<int>(atomicAdd(plan.ticket, 1)), kBlockM);
    if (!in_order) shared.block.tile.visible = {};
  }
  __syncthreads();
  const KeyTile& tile = shared.block.tile;
  if (tile.index < 0) return;
  const typename Config::Walk walk{tile, f.mask_blocks};
  if (warp == 0) {
    MapWindow map;
    const QueryStep first = walk.first(map), second = walk.next(first, map);
    if (lane == 0) shared.steps[0] = first, shared.steps[1] = second, shared.map = map;
  }
  __syncthreads();

  // Addresses in shared memory.
  const TileReader<Operand::kA, false, KeyRows> k_reader(shared.k_smem, warp_n * kWarpN, 0, lane);
  const TileReader<Operand::kB, true, KeyRows, Config::steps(Config::kPartD)> k_columns(shared.k_smem, 0, grad_col * 2,
                                                                                        lane);
  TileReader<Operand::kB, false, QueryRows> q_reader(shared.stage[0].q_smem, warp_m * kWarpM, 0, lane);
  TileReader<Operand::kB, true, QueryRows, Config::steps(kWarpD)> q_columns(shared.stage[0].q_smem, warp_m * kWarpM,
                                                                            warp_m * kWarpD * 2, lane);
  const TileReader<Operand::kA, false, ScoreRows, Config::steps(kWarpM)> p_reader(
      shared.p_smem, warp_n * kWarpN, (warp_m ^ Config::kFirstOther) * kWarpM * 2, lane);
  const TileReader<Operand::kA, true, ScoreRows, 2> ds_columns(shared.ds_smem, 0, grad_row * 2, lane);
  uint32_t p_store = shared_address(shared.p_smem) + accumulator_col(lane, 0) * 2 +
                     ScoreRows::offset(warp_n * kWarpN + accumulator_row(lane, 0), warp_m * kWarpM / 8);
  constexpr uint32_t kToValue = KeyRows::kBytes, kToGradOut = QueryRows::kBytes, kToDs = ScoreRows::kBytes;
  constexpr uint32_t kStageBytes = sizeof(typename Config::Stage);
  constexpr int kWarpRows = kWarpM * QueryRows::kRowBytes;  // from one warp's queries to the next's

  // Global to shared memory.
  const auto load_queries = [&](const QueryStep& to, uint32_t stage_offset) {
    const typename Config::QueryLoader q_loader(shared.block.query_rows + to.member * f.query_strides.head,
                                                f.query_strides.row, f.head_dim);
    const typename Config::QueryLoader grad_out_loader(
        shared.block.grad_out_rows + to.member * p.grad_output_strides.head, p.grad_output_strides.row, f.head_dim_v);
    const int first = to.block * kBlockM, rows_left = tile.queries.length - first;
    const uint32_t q_tile = shared_address(shared.stage[0].q_smem) + stage_offset;
    if (rows_left >= kBlockM) {
      q_loader.load(q_tile, first);
      grad_out_loader.load(q_tile + kToGradOut, first);
    } else {
      const auto exists = [&](int row) { return row < rows_left; };
      q_loader.load_where(q_tile, first, exists);
      grad_out_loader.load_where(q_tile + kToGradOut, first, exists);
    }
  };
  float2 row_stats;
  float row_delta;
  const auto fetch_row = [&](const QueryStep& to) {  // thread i that of row i
    const int row = to.block * kBlockM + static_cast<int>(threadIdx.x);
    row_stats = {0.0f, kInfinity<float>};
    row_delta = 0.0f;
    if (threadIdx.x < kBlockM && row < tile.queries.length) {
      const int64_t at = to.member * f.row_head_stride + row;
      row_stats = __ldg(shared.block.stats_rows + at);
      row_delta = __ldg(shared.block.delta_rows + at);
    }
  };
  const auto store_row = [&] {
    if (threadIdx.x < kBlockM) shared.stats.template store<Config::kGeneral>(threadIdx.x, row_stats, row_delta);
  };

  if (shared.steps[0].block >= 0) {
    load_keys<Config>(shared, p.forward, tile);
    load_queries(shared.steps[0], 0);
    ptx::cp_async_commit();
    fetch_row(shared.steps[0]);
    store_row();
  }
  uint32_t next_stage = kStages == 2 ? kStageBytes : 0;  // offset of the tiles that are loaded next

  float key_acc[2][kMmaD][4] = {}, value_acc[2][kMmaD][4] = {};  // dK and dV
  float slope_sum = 0;
  if (Config::kGeneral && p.grad_slopes) zero_slopes(p, tile, kBlockN);

#pragma unroll 1
  for (uint32_t number = 0; shared.steps[number % 4].block >= 0; ++number) {
    const QueryStep &step = shared.steps[number % 4], &next = shared.steps[(number + 1) % 4];
    ptx::cp_async_wait<0>();  // this step's tiles are here ...
    __syncthreads();          // ... all of them, and nobody reads P, dS and the other stage any more
    if constexpr (kStages == 2) {
      if (next.block >= 0) load_queries(next, next_stage);
      ptx::cp_async_commit();
    }

    // P and dS, rounded: operands of the next products, in registers and in shared memory.
    uint32_t weights[Config::kKeepsOwn ? kWarpM / 16 : 1][2][4], grads[Config::kKeepsOwn ? kWarpM / 16 : 1][2][4];
#pragma unroll(Config::kKeepsOwn ? Config::kScoreParts : 1)
    for (int part = 0; part < Config::kScoreParts; ++part) {
      float score_acc[2][kMmaM][4] = {}, grad_acc[2][kMmaM][4] = {};
      multiply_rows<Element, kSteps>(score_acc, k_reader, 0, q_reader, part * (kMmaM / 2), 0);
      const int row = warp_m * kWarpM + part * 8 * kMmaM + accumulator_col(lane, 0);
      const LaneScores at = {row, step.block * kBlockM + row, tile.first + warp_n * kWarpN + accumulator_row(lane, 0)};
      if constexpr (!Config::kGeneral) start_at_delta(grad_acc, shared.stats, at);
      multiply_rows<Element, kSteps>(grad_acc, k_reader, kToValue, q_reader, part * (kMmaM / 2), kToGradOut);
      if constexpr (Config::kGeneral) {
        const GeneralTile scores = shared.block.general_tile(step, plan, p.grad_slopes != nullptr);
        general_gradients<Element>(score_acc, grad_acc, shared.stats, at, f, shared.block.seed, scores, slope_sum);
      } else {
        plain_gradients(score_acc, grad_acc, shared.stats, at, f.scale);
        if (step.outside) hide_outside(score_acc, grad_acc, tile.band, at);
      }
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
        const int c = Config::kKeepsOwn ? (part * kMmaM + j) / 2 : 0;
        const uint32_t column = p_store ^ ((part * kMmaM + j) * kChunkBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t place = column + (16 * i + 8 * half) * ScoreRows::kRowBytes;
            const float *score = &score_acc[i][j][2 * half], *grad = &grad_acc[i][j][2 * half];
            const int reg = j % 2 * 2 + half;
            weights[c][i][reg] = pack_pair<Element>(score[0], score[1]);
            grads[c][i][reg] = pack_pair<Element>(grad[0], grad[1]);
            ptx::st_shared_b32(place, weights[c][i][reg]);
            ptx::st_shared_b32(place + kToDs, grads[c][i][reg]);
          }
        }
      }
    }
    __syncthreads();
    if (next.block >= 0) fetch_row(next);
    if (warp == 0 && next.block >= 0) {  // looks ahead for all
      MapWindow map = shared.map;
      const QueryStep after = walk.next(next, map);
      __syncwarp();
      if (lane == 0) shared.steps[(number + 2) % 4] = after, shared.map = map;
    }

    // dV, dK: this warp's queries ...
    if constexpr (Config::kKeepsOwn) {
#pragma unroll
      for (int c = 0; c < kWarpM / 16; ++c) {
        multiply_columns<Element>(value_acc, weights[c], q_columns, c, kToGradOut);
        multiply_columns<Element>(key_acc, grads[c], q_columns, c, 0);
      }
    }
    // ... and those of the other warps that have its keys.
#pragma unroll(Config::kKeepsOwn ? Config::kWarpsM : 1)
    for (int other = Config::kFirstOther; other < Config::kWarpsM; ++other) {
      if (other > 0) q_columns.move(((warp_m ^ other) - (warp_m ^ (other - 1))) * kWarpRows);
      const uint32_t flip = (other ^ Config::kFirstOther) * kWarpM * 2;
#pragma unroll
      for (int c = 0; c < kWarpM / 16; ++c) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) p_reader.read(a[i], i, c, 0, flip);
        multiply_columns<Element>(value_acc, a, q_columns, c, kToGradOut);
#pragma unroll
        for (int i = 0; i < 2; ++i) p_reader.read(a[i], i, c, kToDs, flip);
        multiply_columns<Element>(key_acc, a, q_columns, c, 0);
      }
    }

    // On to the other stage, or to what takes this one's place; q_columns back to this warp's queries.
    const uint32_t to_next = kStages == 1 ? 0 : (next_stage == 0 ? 0 - kStageBytes : kStageBytes);
    q_reader.move(to_next);
    q_columns.move(to_next + (warp_m - (warp_m ^ (Config::kWarpsM - 1))) * kWarpRows);
    if constexpr (kStages == 2) {
      next_stage ^= kStageBytes;
    } else {
      __syncthreads();
      if (next.block >= 0) load_queries(next, 0);
      ptx::cp_async_commit();
    }
    if (next.block >= 0) store_row();

    // dQ
    const uint32_t slot =
        (shared.block.first_slot + step.member * plan.query_tiles + step.block) * Config::kWarps + warp;
#pragma unroll 1
    for (int part = 0; part < Config::kGradParts; ++part) {
      float query_acc[2][Config::kMmaPart][4] = {};
#pragma unroll
      for (int c = 0; c < kBlockN / 16; ++c) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) ds_columns.read(a[i], c, i);
        multiply_columns<Element>(query_acc, a, k_columns, c, 0, part * Config::kPartD * 2);
      }
      const uint32_t place = slot * Config::kGradParts + part;
      add_in_order(query_acc, plan.sums + int64_t{place} * (2 * Config::kMmaPart * kWarpSize) + lane,
                   plan.turns + place, step.turn, lane);
      if (step.turn.last) {
        const int first = step.block * kBlockM + grad_row, col = grad_col + part * Config::kPartD;
        store_gradients(query_acc, f.scale,
                        head_rows<Element>(p.grad_query, p.grad_query_strides, tile.batch, tile.head_of(step.member),
                                           tile.queries.first + first) +
                            col,
                        p.grad_query_strides.row, tile.queries.length - first, f.head_dim - col, plan.query_aligned,
                        lane);
      }
    }
    if (Config::kGeneral && p.grad_slopes && next.member != step.member) {
      slope_sum = group_sum<Config::kWarps>(slope_sum, shared.slope_smem);
      if (threadIdx.x == 0) *slope_part(p, tile, step.member, tile.index) = slope_sum;
      slope_sum = 0;
    }
  }

  const int first = tile.first + warp_n * kWarpN, col = warp_m * kWarpD, rows_left = tile.keys.length - first;
  store_gradients(
      key_acc, f.scale,
      head_rows<Element>(p.grad_key, p.grad_key_strides, tile.batch, tile.head_kv, tile.keys.first + first) + col,
      p.grad_key_strides.row, rows_left, f.head_dim - col, plan.key_aligned, lane);
  store_gradients(
      value_acc, 1.0f,
      head_rows<Element>(p.grad_value, p.grad_value_strides, tile.batch, tile.head_kv, tile.keys.first + first) + col,
      p.grad_value_strides.row, rows_left, f.head_dim_v - col, plan.value_aligned, lane);
  if (tile.index == 0) zero_unseen<Config>(p, tile, walk, warp, lane);
}

// ---- the launcher ----

template <typename Config>
void launch_attention_bwd_sm80(const AttentionBackwardParams& p, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const auto aligned = [&](const void* base, const Strides3& strides) {
    return packs_align(base, f.dtype, 4, strides.batch, strides.head, strides.row);
  };
  const AttentionBwdWorkspace workspace(f);
  auto* const bytes = static_cast<unsigned char*>(p.workspace);
  AttentionBwdPlan plan;
  // Queries and their gradients stay in L2: 16-bit Q and dO, fp32 dQ.
  const int64_t group_bytes = f.num_heads_q / f.num_heads_kv * f.seqlen_q * (6 * f.head_dim + 2 * f.head_dim_v);
  plan.order = tile_order(f.cu_seqlens_k, std::max<int64_t>(f.seqlen_kv, 1), f.batch, f.num_heads_kv, Config::kBlockN,
                          group_bytes);
  plan.ticket = reinterpret_cast<uint32_t*>(bytes);
  plan.turns = reinterpret_cast<uint32_t*>(bytes + workspace.turns);
  plan.sums = reinterpret_cast<float4*>(bytes + workspace.sums);
  plan.query_tiles = workspace.query_tiles;
  plan.softcap = static_cast<float>(f.rule.softcap);
  plan.softcap_log2 = f.rule.softcap != 0 ? static_cast<float>(2 * kLog2E * f.scale / f.rule.softcap) : 0.0f;
  plan.query_aligned = aligned(p.grad_query, p.grad_query_strides);
  plan.key_aligned = aligned(p.grad_key, p.grad_key_strides);
  plan.value_aligned = aligned(p.grad_value, p.grad_value_strides);
  launch(attention_bwd_sm80_kernel<Config>,
         {"attention_bwd_sm80", plan.order.blocks(), Config::kThreads, sizeof(typename Config::Shared), stream}, p,
         plan);
}

template <typename Element, int kHeadDim>
void dispatch_attention_bwd_sm80(const AttentionBackwardParams& p, cudaStream_t stream) {
  has_general_scores(p.forward) ? launch_attention_bwd_sm80<AttentionBwd<Element, kHeadDim, true>>(p, stream)
                                : launch_attention_bwd_sm80<AttentionBwd<Element, kHeadDim, false>>(p, stream);
}

template <typename Element>
void attention_bwd_sm80(const AttentionBackwardParams& p, cudaStream_t stream) {
  if (p.forward.batch <= 0 || p.forward.num_heads_q <= 0) return;
  switch (attention_bwd_width(p.forward)) {
    case 64: return dispatch_attention_bwd_sm80<Element, 64>(p, stream);
    case 128: return dispatch_attention_bwd_sm80<Element, 128>(p, stream);
    default: return dispatch_attention_bwd_sm80<Element, 256>(p, stream);
  }
}

}  // namespace mha_ext
