// The gradient of a float attn_mask: dS = P (dP - delta), added up over the axes that the mask repeats.
//
// A block owns a tile of the gradient and takes the (batch, head, query tile)s that share it one after the other, so
// that the order of every sum is fixed. Each time it computes S = Q K^T and dP = dO V^T anew.
#pragma once

#include <cmath>

#include "device/tf32.h"
#include "kernels/attention.h"
#include "kernels/attention_bwd_bias_items.cuh"
#include "kernels/attention_fwd_scores.cuh"
#include "launch.h"

namespace mha_ext {

// ---- products ----

// acc += a b^T, over one slice.
template <typename Config>
struct BiasGradProduct {
  using Element = typename Config::Element;
  TileReader<Operand::kA, false, typename Config::TileA> a_reader;
  TileReader<Operand::kB, false, typename Config::TileB> b_reader;

  __device__ __forceinline__ BiasGradProduct(const typename Config::Stage& stage, int warp_m, int warp_n, int lane)
      : a_reader(stage.a_smem, warp_m, 0, lane), b_reader(stage.b_smem, warp_n, 0, lane) {}

  // stage_offset: of the slice's stage, in bytes.
  __device__ __forceinline__ void add(typename Config::Acc& acc, uint32_t stage_offset, int columns) const {
#pragma unroll
    for (int step = 0; step < Config::kSliceBytes / kFragmentBytes; ++step) {
      if (step > 0 && step * static_cast<int>(kFragmentBytes / sizeof(Element)) >= columns) break;
      uint32_t a[Config::kMmaM][4];
#pragma unroll
      for (int i = 0; i < Config::kMmaM; ++i) a_reader.read(a[i], i, step, stage_offset);
      if constexpr (sizeof(Element) == 4) {
        add_tf32(acc, a, step, stage_offset);
      } else {
#pragma unroll
        for (int j = 0; j < Config::kMmaN; j += 2) {
          uint32_t b[4];
          b_reader.read(b, j / 2, step, stage_offset);
#pragma unroll
          for (int i = 0; i < Config::kMmaM; ++i) {
            ptx::mma_m16n8<Element>(acc[i][j], a[i], b[0], b[1]);
            ptx::mma_m16n8<Element>(acc[i][j + 1], a[i], b[2], b[3]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_tf32(typename Config::Acc& acc, const uint32_t (&a)[Config::kMmaM][4], int step,
                                           uint32_t stage_offset) const {
    Tf32Operand<Config::kProducts, 4> a_parts[Config::kMmaM];
#pragma unroll
    for (int i = 0; i < Config::kMmaM; ++i) split(a_parts[i], a[i]);
#pragma unroll
    for (int j = 0; j < Config::kMmaN; j += 2) {
      uint32_t b[4];
      b_reader.read(b, j / 2, step, stage_offset);
      Tf32Operand<Config::kProducts, 4> b_parts;
      split(b_parts, b);
      multiply_tf32<false>(acc, j, a_parts, b_parts);
    }
  }

  static __device__ __forceinline__ void split(Tf32Operand<Config::kProducts, 4>& parts, const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) parts.set(i, __uint_as_float(words[i]));
  }
};

// ---- scores ----

// Products q . k become weights, exactly 0 where the key is hidden or the query does not exist.
template <typename Config>
__device__ __forceinline__ void weigh(typename Config::Acc& acc, const AttentionParams& p, const QueryTile& tile,
                                      const typename Config::Item& item, int row, int key) {
  using Element = typename Config::Element;
  const float softcap = static_cast<float>(p.rule.softcap);
  if (sizeof(Element) == 4 && softcap != 0) {  // as exact as fp32
    const float to_argument = p.scale / softcap;
    change_scores(acc, [=](int) { return [=](float raw, int) { return softcap * std::tanh(raw * to_argument); }; });
  } else {
    scale_scores(acc, p.scale, softcap);
  }
  if (p.rule.mask_dtype == DType::kFloat32) {
    add_bias<float>(acc, p, tile, row, key);
  } else {
    add_bias<Element>(acc, p, tile, row, key);
  }
  if (p.rule.alibi_slopes) add_alibi(acc, p.rule, tile, row, key);
  if (item.masked) hide_outside(acc, tile, row, key);
  change_scores(acc, [&](int r) {
    const float shift = item.stats[row + r].x;
    const float log2_sum = row + r < tile.rows() ? item.stats[row + r].y : kInfinity<float>;
    return [=](float score, int) {
      const float weight = ptx::ex2((score - shift) * kLog2E - log2_sum);
      return score == -kInfinity<float> ? 0.0f : weight;
    };
  });
}

// dP becomes what reaches the weights before dropout.
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void drop_grads(float (&grads)[kMmaM][kMmaN][4], const float (&weights)[kMmaM][kMmaN][4],
                                           float keep_scale) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) grads[i][j][r] = weights[i][j][r] < 0.0f ? 0.0f : grads[i][j][r] * keep_scale;
    }
  }
}

// sums += dS = P (dP - delta). dP of a hidden weight may be NaN.
template <typename Config>
__device__ __forceinline__ void add_score_grads(typename Config::Acc& sums, const typename Config::Acc& weights,
                                                const typename Config::Acc& grads, const float* delta) {
#pragma unroll
  for (int i = 0; i < Config::kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float row_delta = delta[16 * i + 8 * half];
#pragma unroll
      for (int j = 0; j < Config::kMmaN; ++j) {
#pragma unroll
        for (int r = 2 * half; r < 2 * half + 2; ++r) {
          const float weight = weights[i][j][r];
          if (weight != 0.0f) sums[i][j][r] += fabsf(weight) * (grads[i][j][r] - row_delta);
        }
      }
    }
  }
}

// ---- the kernel ----

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    attention_bwd_bias_kernel(const __grid_constant__ AttentionBackwardParams p,
                              const __grid_constant__ BiasGradPlan plan) {
  constexpr int kMmaM = Config::kMmaM, kMmaN = Config::kMmaN, kStages = Config::kStages;
  using Acc = typename Config::Acc;
  auto& shared = shared_storage<typename Config::Shared>();
  const AttentionParams& f = p.forward;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warp_m = warp / Config::kTile.warps_n * Config::kWarpM;
  const int warp_n = warp % Config::kTile.warps_n * Config::kWarpN;
  const BiasGradProduct<Config> product(shared.stage[0], warp_m, warp_n, lane);

  if (threadIdx.x == 0) shared.block = BiasGradBlock::of(static_cast<int>(blockIdx.x), p, plan);
  __syncthreads();

  // Fill the pipeline.
  BiasGradLoader<Config> loader(shared, f, plan);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) loader.load(shared, stage, p, plan);
  __syncthreads();  // the first item is known
  int stage = 0;
  const auto add_product = [&](Acc& acc, int head_dim) {
#pragma unroll 1
    for (int col = 0; col < head_dim; col += Config::kSlice) {
      ptx::cp_async_wait<kStages - 2>();  // this slice is here ...
      __syncthreads();                    // ... all of it, and nobody reads the stage before it any more
      loader.load(shared, stage > 0 ? stage - 1 : kStages - 1, p, plan);
      product.add(acc, stage * sizeof(typename Config::Stage), head_dim - col);
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
  };

  // Add up.
  const int row = warp_m + accumulator_row(lane, 0), col = warp_n + accumulator_col(lane, 0);
  float bias_acc[kMmaM][kMmaN][4] = {};
#pragma unroll 1
  for (int parity = 0;; parity ^= 1) {
    const typename Config::Item& item = shared.item[parity];
    if (item.batch < 0) break;
    float weights[kMmaM][kMmaN][4] = {};
    add_product(weights, f.head_dim);
    const QueryTile tile(f, item.batch, item.head, item.first, Config::kBlockM);
    const int key = shared.block.n_begin + col;
    weigh<Config>(weights, f, tile, item, row, key);
    if (f.dropout.rng_state) {  // dropped weights become negative
      apply_dropout(weights, f, tile, row, key, [](float weight, bool keep) { return keep ? weight : -weight; });
    }

    float grads[kMmaM][kMmaN][4] = {};
    add_product(grads, f.head_dim_v);
    if (f.dropout.rng_state) drop_grads(grads, weights, static_cast<float>(f.dropout.keep_scale));
    add_score_grads<Config>(bias_acc, weights, grads, item.delta + row);
  }

  // Store.
  const BiasGradBlock& block = shared.block;
  const int keys_left = static_cast<int>(f.seqlen_kv) - block.n_begin;
  float* grad_bias = plan.parts > 1 ? static_cast<float*>(p.workspace) + block.part * plan.elements : p.grad_bias;
  grad_bias += (block.batch * p.bias_heads + block.head) * p.bias_rows * f.seqlen_kv + block.n_begin;
  if (p.bias_rows > 1) {
    const int first = block.tile_m * Config::kBlockM + row;
    store_rows<float>(bias_acc, keys_left - warp_n, f.seqlen_kv % 4 == 0, lane, [&](int i, int half) -> float* {
      const int query = first + 16 * i + 8 * half;
      return query < f.seqlen_q ? grad_bias + query * f.seqlen_kv + warp_n : nullptr;
    });
    return;
  }
  // One row: over a lane's rows, over the lanes of a column, over the warps.
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) sum += bias_acc[i][j][e] + bias_acc[i][j][2 + e];
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      if (lane < 4) shared.key_sums[warp / Config::kTile.warps_n][col + 8 * j + e] = sum;
    }
  }
  __syncthreads();
  const int key = threadIdx.x;
  if (key < min(Config::kBlockN, keys_left)) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::kTile.warps_m; ++w) sum += shared.key_sums[w][key];
    grad_bias[key] = sum;
  }
}

// grad_bias = the sum of its parts, first to last.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sum_bias_parts_kernel(const __grid_constant__ AttentionBackwardParams p,
                                                                  const __grid_constant__ BiasGradPlan plan) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= plan.elements) return;
  const float* part = static_cast<const float*>(p.workspace) + at;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < plan.parts; ++i) sum += part[i * plan.elements];
  p.grad_bias[at] = sum;
}

// ---- the launchers ----

template <typename Element, int kProducts>
void launch_attention_bwd_bias(const AttentionBackwardParams& p, cudaStream_t stream) {
  using Config = BiasGrad<Element, kProducts>;
  const BiasGradPlan plan(p);
  launch(attention_bwd_bias_kernel<Config>,
         {"attention_bwd_bias", plan.tiles, Config::kThreads, sizeof(typename Config::Shared), stream}, p, plan);
  if (plan.parts > 1) {
    constexpr int kThreads = 256;
    launch(sum_bias_parts_kernel<kThreads>,
           {"sum_bias_parts", (plan.elements + kThreads - 1) / kThreads, kThreads, 0, stream}, p, plan);
  }
}

template <typename Element>
void attention_bwd_bias_sm80(const AttentionBackwardParams& p, cudaStream_t stream) {
  launch_attention_bwd_bias<Element, 1>(p, stream);
}

}  // namespace mha_ext
