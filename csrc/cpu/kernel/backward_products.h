// The products of the backward that add up gradients: rows of `to` += weights * rows, over the keys that a query sees
// or over the queries that see a key. The weights lie (key, row) as the scores do, and are read along either axis.
#pragma once

#include "cpu/kernel/products.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// to[i][d] (+)= weight[i][j] (broadcast) * rows[j][d], summed over j; d in lanes. Weight (i, j) lies at
// i * kToStride + j * kRowStride.
template <int kToStride, int kRowStride>
struct GradientBlock {
  const float* weights;
  const float* rows;
  int64_t row_stride;
  int row_count;
  float* to;
  int64_t to_stride;
  int to_count;
  bool accumulate;  // to what `to` holds

  // What `to` holds is added last: it comes from memory, and the sums need not wait for it.
  template <int kTo, int kVecs>
  void block() const {
    if (accumulate) {
#pragma GCC unroll 8
      for (int i = 0; i < kTo; ++i) __builtin_prefetch(to + i * to_stride, 1);
    }
    Vec sum[kTo][kVecs] = {};
    const float* weight = weights;
    const float* row = rows;
    const int64_t stride = row_stride;
    for (int j = row_count; j > 0; --j) {
      Vec x[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) x[v] = load(row + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kTo; ++i) {
        const Vec each = broadcast(weight[i * kToStride]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[i][v] = fma(each, x[v], sum[i][v]);
      }
      weight += kRowStride;
      row += stride;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTo; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        float* at = to + i * to_stride + v * kLanes;
        store(at, accumulate ? sum[i][v] + load(at) : sum[i][v]);
      }
    }
  }

  template <int kVecs>
  struct OfVectors {
    const GradientBlock& x;
    template <int kTo>
    void run() const {
      x.template block<kTo, kVecs>();
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBlock>(to_count, OfVectors<kVecs>{*this});
  }
};

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
