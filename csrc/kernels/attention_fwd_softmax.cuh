// The softmax of the 16-bit forward: what a lane knows of its rows while scores arrive tile by tile, and what is left
// of them in the end.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attention/online_softmax.h"
#include "device/ptx/math.h"
#include "device/warp.h"
#include "kernels/attention_query_tile.cuh"

namespace mha_ext {

// weight = 2^(unit * (score - max)). Worked out on the host, once a launch: the compiler reads them as operands of the
// instructions that use them.
struct ExponentPlan {
  float unit;    // log2(e), times the scale where scores are raw
  float slack;   // max follows the row's largest score only when that is so much larger
  float lowest;  // what max begins with: below any score, and finite even as an exponent, so that a hidden score of
                 // -inf needs no case of its own
  bool entropy;  // general scores: moments are asked for
};

// Weights up to 2^8 are as precise as those up to 1, and in most tiles nothing has to be rescaled. Statistics want the
// largest score itself.
inline ExponentPlan general_exponents(bool max_score, bool entropy) {
  return {kLog2E, max_score || entropy ? 0 : 8 / kLog2E, -FLT_MAX, entropy};
}

inline ExponentPlan plain_exponents(float scale) {
  const float unit = scale * kLog2E;
  return {unit, std::min(8 / unit, 1e30f), -3e38f / std::max(unit, 1.0f), false};
}

// What a lane knows of its rows 16 i + 8 half: weight = 2^(unit * (score - max)).
template <typename Config>
struct RowState {
  static constexpr int kMmaM = Config::kMmaM, kMmaN = Config::kMmaN;
  static constexpr bool kGeneral = Config::kGeneral;
  using Rows = float[kMmaM][2];
  using Moments = typename Config::Moments;

  const ExponentPlan& plan;
  Rows max;          // no larger than the row's largest score
  Rows sum;          // of weights, over the lane's keys
  Moments& moments;  // the same of weight * exponent. In shared memory: few calls ask for it, and registers are scarce

  __device__ __forceinline__ RowState(const ExponentPlan& plan, Moments& moments) : plan(plan), moments(moments) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[i][half] = plan.lowest;
        sum[i][half] = 0;
        if (wants_moments()) moment(i, half) = 0;
      }
    }
  }

  __device__ __forceinline__ bool wants_moments() const { return kGeneral && plan.entropy; }
  __device__ __forceinline__ float& moment(int i, int half) const { return moments[i][half][threadIdx.x]; }

  // A NaN among general scores must show in max_score; otherwise its weight shows it.
  static __device__ __forceinline__ float larger(float a, float b) {
    return kGeneral ? ptx::max_nan(a, b) : fmaxf(a, b);
  }

  // The lane's largest scores of a tile, and whether max has to follow one of them.
  __device__ __forceinline__ bool find_largest(Rows& largest, const float (&acc)[kMmaM][kMmaN][4]) const {
    bool follows = false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = larger(acc[i][0][2 * half], acc[i][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < kMmaN; ++j) x = larger(x, larger(acc[i][j][2 * half], acc[i][j][2 * half + 1]));
        largest[i][half] = x;
        follows |= !(x <= max[i][half] + plan.slack);
      }
    }
    return follows;
  }

  // largest: of whole rows.
  template <int kMmaV>
  __device__ __forceinline__ void rescale(const Rows& largest, float (&out_acc)[kMmaM][kMmaV][4]) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float new_max = larger(max[i][half], largest[i][half]);
        const float change = kGeneral ? exponent(max[i][half], new_max) : shift(max[i][half]) - shift(new_max);
        const float factor = ptx::ex2(change);
        if (wants_moments()) moment(i, half) = factor == 0 ? 0 : factor * fmaf(change, sum[i][half], moment(i, half));
        sum[i][half] *= factor;
        max[i][half] = new_max;
#pragma unroll
        for (int j = 0; j < kMmaV; ++j) {
          out_acc[i][j][2 * half] *= factor;
          out_acc[i][j][2 * half + 1] *= factor;
        }
      }
    }
  }

  // Raw scores: one instruction. General ones stay in natural units until the largest is subtracted.
  __device__ __forceinline__ float exponent(float score, float max) const {
    return kGeneral ? (score - max) * plan.unit : fmaf(score, plan.unit, -shift(max));
  }

  __device__ __forceinline__ float shift(float max) const { return __fmul_rn(max, plan.unit); }

  // For the entropy; acc holds scores.
  __device__ __forceinline__ void add_moments(const float (&acc)[kMmaM][kMmaN][4]) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = exponent(acc[i][j][r], max[i][r / 2]);
          moment(i, r / 2) += ptx::ex2(x) * fmaxf(x, -200.0f);  // 0 * -inf is NaN
        }
      }
    }
  }

  // Scores become weights.
  __device__ __forceinline__ void exponentiate(float (&acc)[kMmaM][kMmaN][4]) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          acc[i][j][r] = ptx::ex2(exponent(acc[i][j][r], max[i][r / 2]));
          sum[i][r / 2] += acc[i][j][r];
        }
      }
    }
  }
};

// ---- the end of a row ----

// What a finished row leaves: a factor for its output, and its statistics in memory. sum and moment: of the whole row,
// relative to max in natural units.
__device__ __forceinline__ float finish_row(const AttentionParams& p, const QueryTile& tile, int row, bool writes,
                                            float max, float sum, float moment) {
  const bool empty = sum == 0;
  if (empty) max = -kInfinity<float>;
  const float sink = row_sink<float>(p.rule, tile.head + tile.head_of(min(row, tile.rows() - 1)));
  const float shift = softmax_shift(max_or_nan(max, sink));
  const float change = (max - shift) * kLog2E, factor = ptx::ex2(change);
  const float total = sum * factor + ptx::ex2((sink - shift) * kLog2E);
  const float log2_total = log2f(total);
  constexpr float kLn2 = 0.6931471805599453f;

  if (writes && row < tile.rows()) {
    const int64_t at = tile.offset({p.row_batch_stride, p.row_head_stride, 1}, row);
    p.lse[at] = shift + log2_total * kLn2;
    if (p.row_stats) reinterpret_cast<float2*>(p.row_stats)[at] = empty ? float2{0, 0} : float2{shift, log2_total};
    if (p.max_score) p.max_score[at] = max;
    // weight = w / total, with log2 w = its exponent
    if (p.entropy) {
      const float weights = sum * factor / total, moments = factor * fmaf(change, sum, moment) / total;
      p.entropy[at] = empty ? 0 : (log2_total * weights - moments) * kLn2;
    }
  }
  return empty ? 0 : factor / total;
}

}  // namespace mha_ext
