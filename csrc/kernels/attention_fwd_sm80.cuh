// Fused attention, forward, 16-bit: mma.sync fed by cp.async (sm_80 and newer).
//
// A block takes a tile of queries and walks over the tiles of keys that they see, from the last to the first:
//
//   S = Q K^T        scores of the tile, in registers
//   P = exp(S - m)   m: the row's largest score so far, or a little less
//   O = O + P V      what was summed relative to an older m is rescaled first
//
// and divides by the sum of P at the end, so that no matrix of scores is ever stored. One tile of keys and one of
// values lie in shared memory: the next values arrive during Q K^T, the next keys during P V.
//
// Plain scores stay raw: they are compared as they come from the tensor cores (so the scale is positive), and scale and
// log2(e) are folded into the exponent. General scores are in natural units, see attention_fwd_scores.cuh.
#pragma once

#include "device/ptx/barrier.h"
#include "device/ptx/math.h"
#include "device/ptx/mma.h"
#include "kernels/attention.h"
#include "kernels/attention_fwd_scores.cuh"
#include "kernels/attention_fwd_softmax.cuh"
#include "kernels/attention_general.h"
#include "launch.h"

namespace mha_ext {

template <typename Element_, int kHeadDim_, bool kGeneral_>
struct AttentionFwd {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // of queries and keys as of values; smaller ones are filled with zeros
  static constexpr bool kGeneral = kGeneral_;
  static constexpr AttentionTile kTile = attention_fwd_tile(kHeadDim, kGeneral);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarpsM = kTile.warps_m, kWarpsN = kTile.warps_n;
  static constexpr int kThreads = threads(kTile);

  // A warp's part of the scores, kWarpM x kWarpN, and of the output, kWarpM x kWarpV, in mma tiles of 16 x 8.
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN, kWarpV = kHeadDim / kWarpsN;
  static constexpr int kMmaM = kWarpM / 16, kMmaN = kWarpN / 8, kMmaV = kWarpV / 8;

  // The widest kernel halves a warp's columns where there are no more than 128 values. They begin at a multiple of 64,
  // as the swizzle does.
  static constexpr bool kHalves = kHeadDim == 256;
  static __device__ __forceinline__ int warp_columns(int head_dim_v) {
    return kHalves && head_dim_v <= kWarpV ? kWarpV / 2 : kWarpV;
  }

  static constexpr int kRowBytes = kHeadDim * sizeof(Element);
  using QueryRows = SharedTile<kBlockM, kRowBytes>;
  using KeyRows = SharedTile<kBlockN, kRowBytes>;
  using WeightRows = SharedTile<kBlockM, kBlockN * sizeof(Element)>;
  using Loader = RowLoader<Element, KeyRows, kThreads>;

  // Where two warps share their rows: the weights of both, and a number of each for every row.
  struct Exchange {
    unsigned char p_smem[WeightRows::kBytes];
    float row_smem[2][kBlockM];
  };
  struct Nothing {};
  using Moments = float[kMmaM][2][kGeneral ? kThreads : 1];  // of a row, by thread
  struct Shared {
    unsigned char q_smem[QueryRows::kBytes];
    unsigned char k_smem[KeyRows::kBytes];
    unsigned char v_smem[KeyRows::kBytes];
    std::conditional_t<kWarpsN == 2, Exchange, Nothing> exchange;
    // What is seldom read: the registers are for accumulators.
    QueryTile tile;
    Moments moments;
  };

  static_assert(kBlockN == kMaskBlock, "a word of key bits is a tile");
  static_assert(kWarpsN == 1 || (kWarpsN == 2 && kWarpV % 64 == 0));
  static_assert(!kHalves || (kWarpsN == 2 && kWarpV == 128));
  static_assert(kTile.blocks_per_sm * (sizeof(Shared) + 1024) <= kSharedPerSm);
};

// Named barriers: warps come to the first from two places.
enum AttentionFwdBarrier {
  kValuesBarrier = 1,
  kPairBarrier,  // of warps that share their rows: one for each pair, from here on
};

// ---- global to shared ----

// A tile of keys or values; zeros in place of rows that no query of the tile sees.
template <typename Config>
__device__ __forceinline__ void load_keys(const typename Config::Loader& loader, unsigned char* smem,
                                          const KeyStep& keys, const QueryTile& tile, const MaskBlocks& mask) {
  const int first = keys.index * Config::kBlockN;
  uint64_t seen = ~uint64_t{0};
  if constexpr (Config::kGeneral) seen = key_word(mask, tile.batch, tile.head_kv, keys.index);
  if (keys.full && seen == ~uint64_t{0}) {
    loader.load(shared_address(smem), first);
  } else {
    const VisibleRange range = tile.range;
    loader.load_where(shared_address(smem), first, [&](int row) {
      return first + row >= range.begin && first + row < range.end && (seen >> row & 1);
    });
  }
}

// Until the values are here and nobody reads keys any more. Whether `follows` is true in the warp; where two share
// their rows, in the block.
template <typename Config>
__device__ __forceinline__ bool wait_for_values(bool follows) {
  ptx::cp_async_wait<0>();
  if constexpr (Config::kWarpsN == 2) return ptx::barrier_or<Config::kThreads>(kValuesBarrier, follows);
  ptx::barrier_sync<Config::kThreads>(kValuesBarrier);
  return __any_sync(kAllLanes, follows);
}

// ---- the two products ----

template <typename Config, typename QueryReader, typename KeyReader>
__device__ __forceinline__ void multiply_keys(float (&score_acc)[Config::kMmaM][Config::kMmaN][4],
                                              const QueryReader& q_reader, const KeyReader& k_reader, int head_dim) {
  using Element = typename Config::Element;
#pragma unroll
  for (int step = 0; step < Config::kRowBytes / kFragmentBytes; ++step) {
    if (step == 12 && head_dim <= 192) break;  // a quarter of the widest kernel's work is in vain
    uint32_t q[Config::kMmaM][4];
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) q_reader.read(q[i], i, step);
#pragma unroll
    for (int j = 0; j < Config::kMmaN; j += 2) {
      uint32_t k[4];
      k_reader.read(k, j / 2, step);
#pragma unroll
      for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (step == 0) {
            ptx::mul_m16n8<Element>(score_acc[i][j + n], q[i], k[2 * n], k[2 * n + 1]);
          } else {
            ptx::mma_m16n8<Element>(score_acc[i][j + n], q[i], k[2 * n], k[2 * n + 1]);
          }
        }
      }
    }
  }
}

// weights(p, i, step): the A operand of rows 16 i .. and keys 16 step .. kMmas: tiles of 8 columns.
template <typename Config, int kMmas, typename ValueReader, typename Weights>
__device__ __forceinline__ void multiply_values(float (&out_acc)[Config::kMmaM][Config::kMmaV][4],
                                                const ValueReader& v_reader, Weights weights) {
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    uint32_t p[Config::kMmaM][4];
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) weights(p[i], i, step);
#pragma unroll
    for (int j = 0; j < kMmas; j += 2) {
      uint32_t v[4];
      v_reader.read(v, step, j / 2);
#pragma unroll
      for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          ptx::mma_m16n8<typename Config::Element>(out_acc[i][j + n], p[i], v[2 * n], v[2 * n + 1]);
        }
      }
    }
  }
}

// Two accumulator tiles are, pair by pair, the A operand of 16 keys.
template <typename Element, int kMmaN>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[4], const float (&acc)[kMmaN][4], int step) {
#pragma unroll
  for (int reg = 0; reg < 4; ++reg) {
    const float* pair = &acc[2 * step + quarter_k<Operand::kA>(reg)][2 * quarter_row<Operand::kA>(reg)];
    p[reg] = pack_pair<Element>(pair[0], pair[1]);
  }
}

// ---- two warps that share their rows ----

template <typename Config>
__device__ __forceinline__ void wait_for_pair(int row) {
  ptx::barrier_sync<2 * kWarpSize>(kPairBarrier + row / Config::kWarpM);
}

// The weights of both are operands of either.
template <typename Config>
__device__ __forceinline__ void store_weights(unsigned char* p_smem,
                                              const float (&acc)[Config::kMmaM][Config::kMmaN][4], int row, int warp_n,
                                              int lane) {
  using Rows = typename Config::WeightRows;
#pragma unroll
  for (int j = 0; j < Config::kMmaN; ++j) {
    const uint32_t first = shared_address(p_smem) + Rows::offset(row, warp_n * Config::kMmaN + j) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::st_shared_b32(first + (16 * i + 8 * half) * Rows::kRowBytes,
                           pack_pair<typename Config::Element>(acc[i][j][2 * half], acc[i][j][2 * half + 1]));
      }
    }
  }
}

// Combines what they know of each row.
template <typename Config, typename Combine>
__device__ __forceinline__ void exchange_rows(typename Config::Shared& shared, float (&rows)[Config::kMmaM][2],
                                              int warp_n, int row, int lane, Combine combine) {
  if constexpr (Config::kWarpsN == 2) {
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (lane % 4 == 0) shared.exchange.row_smem[warp_n][row + 16 * i + 8 * half] = rows[i][half];
      }
    }
    wait_for_pair<Config>(row);
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[i][half] = combine(rows[i][half], shared.exchange.row_smem[1 - warp_n][row + 16 * i + 8 * half]);
      }
    }
  }
}

// ---- the kernel ----

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    attention_fwd_sm80_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ QueryTilePlan plan,
                              const __grid_constant__ ExponentPlan exponents) {
  using Element = typename Config::Element;
  constexpr int kMmaM = Config::kMmaM, kMmaN = Config::kMmaN, kMmaV = Config::kMmaV;
  constexpr int kBlockN = Config::kBlockN;
  constexpr bool kGeneral = Config::kGeneral;

  auto& shared = shared_storage<typename Config::Shared>();
  const int lane = threadIdx.x % kWarpSize;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);  // so the compiler knows it for uniform
  const int warp_m = warp / Config::kWarpsN, warp_n = warp % Config::kWarpsN;

  // Which queries, which keys.
  if (threadIdx.x == 0) shared.tile = QueryTile(p, plan);
  __syncthreads();
  const QueryTile& tile = shared.tile;
  if (tile.count == 0) return;
  const int first_row = warp_m * Config::kWarpM;  // of the warp, in the tile
  KeyWalk<kBlockN, kGeneral> walk(tile.range, first_row < tile.rows());
  KeyStep keys = walk.before(tile.range.empty() ? 0 : tile.range.end_tile(kBlockN), tile, p.mask_blocks);

  // Their way to shared memory ...
  const auto head_rows = [&](const void* tensor, const Strides3& strides) {
    return static_cast<const Element*>(tensor) + tile.batch * strides.batch + tile.head_kv * strides.head +
           tile.keys.first * strides.row;
  };
  const typename Config::Loader k_loader(head_rows(p.key, p.key_strides), p.key_strides.row, p.head_dim);
  const typename Config::Loader v_loader(head_rows(p.value, p.value_strides), p.value_strides.row, p.head_dim_v);
  if (keys.index >= 0) {
    load_query_rows<Element, typename Config::QueryRows, Config::kThreads>(shared_address(shared.q_smem), p, tile);
    load_keys<Config>(k_loader, shared.k_smem, keys, tile, p.mask_blocks);
    ptx::cp_async_commit();
  }

  // ... and from there to registers.
  const int row = first_row + accumulator_row(lane, 0);  // the lane's first
  const TileReader<Operand::kA, false, typename Config::QueryRows> q_reader(shared.q_smem, first_row, 0, lane);
  const TileReader<Operand::kB, false, typename Config::KeyRows> k_reader(shared.k_smem, warp_n * Config::kWarpN, 0,
                                                                          lane);
  const int first_col = warp_n * Config::warp_columns(p.head_dim_v);
  const int columns = min(p.head_dim_v - first_col, Config::warp_columns(p.head_dim_v));  // of the warp's output
  const TileReader<Operand::kB, true, typename Config::KeyRows> v_reader(
      shared.v_smem, 0, first_col * static_cast<int>(sizeof(Element)), lane);

  RowState<Config> state(exponents, shared.moments);
  float out_acc[kMmaM][kMmaV][4] = {};

  const auto load_next_keys = [&] {
    keys = walk.before(keys.index, tile, p.mask_blocks);
    if (keys.index >= 0) load_keys<Config>(k_loader, shared.k_smem, keys, tile, p.mask_blocks);
    ptx::cp_async_commit();
  };

#pragma unroll 1
  while (keys.index >= 0) {
    ptx::cp_async_wait<0>();  // the keys are here ...
    __syncthreads();          // ... all of them, and nobody reads values any more
    load_keys<Config>(v_loader, shared.v_smem, keys, tile, p.mask_blocks);
    ptx::cp_async_commit();

    // On an edge of the band a warp may have nothing to do but its part of the copies.
    if (!keys.full && !tile.sees(first_row, Config::kWarpM, keys.index * kBlockN, kBlockN)) {
      wait_for_values<Config>(false);
      load_next_keys();
      continue;
    }

    // Scores.
    float score_acc[kMmaM][kMmaN][4], largest[kMmaM][2];
    multiply_keys<Config>(score_acc, q_reader, k_reader, p.head_dim);
    const int key = keys.index * kBlockN + warp_n * Config::kWarpN + accumulator_col(lane, 0);
    if constexpr (kGeneral) make_general_scores<Element>(score_acc, p, tile, row, key, keys.masked);
    if (!keys.full) hide_outside(score_acc, tile, row, key);
    const bool follows = wait_for_values<Config>(state.find_largest(largest, score_acc));
    load_next_keys();

    // Weights.
    if (follows) {
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (float& x : largest[i]) x = quad_reduce(x, state.larger);
      }
      exchange_rows<Config>(shared, largest, warp_n, row, lane, state.larger);
      state.rescale(largest, out_acc);
    }
    if (state.wants_moments()) state.add_moments(score_acc);
    state.exponentiate(score_acc);
    if constexpr (kGeneral) {
      if (p.dropout.rng_state) {
        apply_dropout(score_acc, p, tile, row, key, [](float weight, bool keep) { return keep ? weight : 0.0f; });
      }
    }

    // Output.
    if constexpr (Config::kWarpsN == 1) {
      multiply_values<Config, kMmaV>(out_acc, v_reader, [&](uint32_t (&weights)[4], int i, int step) {
        pack_weights<Element>(weights, score_acc[i], step);
      });
    } else {
      store_weights<Config>(shared.exchange.p_smem, score_acc, row, warp_n, lane);
      wait_for_pair<Config>(row);
      const TileReader<Operand::kA, false, typename Config::WeightRows> p_reader(shared.exchange.p_smem, first_row, 0,
                                                                                 lane);
      const auto weights = [&](uint32_t (&weights)[4], int i, int step) { p_reader.read(weights, i, step); };
      if (Config::kHalves && columns <= Config::kWarpV / 2) {
        multiply_values<Config, kMmaV / 2>(out_acc, v_reader, weights);
      } else {
        multiply_values<Config, kMmaV>(out_acc, v_reader, weights);
      }
    }
  }

  // Divide by the sums, store.
  const auto add = [](float a, float b) { return a + b; };
  float moment[kMmaM][2] = {};
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.sum[i][half] = quad_sum(state.sum[i][half]);
      if (state.wants_moments()) moment[i][half] = quad_sum(state.moment(i, half));
    }
  }
  exchange_rows<Config>(shared, state.sum, warp_n, row, lane, add);
  if (Config::kWarpsN == 2 && state.wants_moments()) {
    wait_for_pair<Config>(row);  // the sums are read
    exchange_rows<Config>(shared, moment, warp_n, row, lane, add);
  }
  const bool writes = lane % 4 == 0 && warp_n == 0;
  const float keep_scale = kGeneral && p.dropout.rng_state ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = kGeneral ? state.max[i][half] : state.max[i][half] * p.scale;
      const float factor =
          keep_scale * finish_row(p, tile, row + 16 * i + 8 * half, writes, max, state.sum[i][half], moment[i][half]);
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& out = out_acc[i][j][2 * half + e];
          out = state.sum[i][half] == 0 ? 0 : out * factor;  // a NaN beside a weight of 0 is NaN
        }
      }
    }
  }
  store_rows<Element>(out_acc, columns, plan.output_aligned, lane, [&](int i, int half) -> Element* {
    const int r = row + 16 * i + 8 * half;
    if (r >= tile.rows()) return nullptr;
    return static_cast<Element*>(p.output) + tile.offset(p.output_strides, r) + first_col;
  });
}

// ---- the launcher ----

template <typename Element, int kHeadDim, bool kGeneral>
void launch_attention_fwd(const AttentionParams& p, cudaStream_t stream) {
  using Config = AttentionFwd<Element, kHeadDim, kGeneral>;
  const QueryTilePlan plan = query_tile_plan(p, Config::kBlockM);
  const ExponentPlan exponents = kGeneral ? general_exponents(p.max_score, p.entropy) : plain_exponents(p.scale);
  launch(attention_fwd_sm80_kernel<Config>,
         {"attention_fwd_sm80", plan.order.blocks(), Config::kThreads, sizeof(typename Config::Shared), stream}, p,
         plan, exponents);
}

template <typename Element, int kHeadDim>
void dispatch_attention_fwd(const AttentionParams& p, cudaStream_t stream) {
  has_general_forward(p) ? launch_attention_fwd<Element, kHeadDim, true>(p, stream)
                         : launch_attention_fwd<Element, kHeadDim, false>(p, stream);
}

template <typename Element>
void attention_fwd_sm80(const AttentionParams& p, cudaStream_t stream) {
  if (p.batch <= 0 || p.num_heads_q <= 0 || p.seqlen_q <= 0) return;
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  if (head_dim <= 64) return dispatch_attention_fwd<Element, 64>(p, stream);
  if (head_dim <= 128) return dispatch_attention_fwd<Element, 128>(p, stream);
  dispatch_attention_fwd<Element, 256>(p, stream);
}

}  // namespace mha_ext
