// The two products of a tile, blocked for registers. K and V are read as they lie, nothing is packed:
//
//   scores, queries in lanes   scores[key][row] = K[key][d] (broadcast) * queries[d][row]   summed over d
//   output, d in lanes         out[row][d] = weight[row][key] (broadcast) * V[key][d]       summed over keys
#pragma once

#include "cpu/kernel/elements.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Accumulators of a micro-kernel: broadcasts by vectors. A step of it loads the vectors and uses each with every
// broadcast, so that wide shapes load less a product, and 8 sums or more are needed that do not wait for each other:
// two units with a latency of 4 cycles. 32 registers: 6 x 4 leaves 8 of them, 8 x 3 and 12 x 2 do too, 16 x 1 loads a
// broadcast a product (14-18 % slower, for tiles of one vector only). 16 registers: 6 x 2 leaves 4, 12 x 1 leaves 3; 4
// x 3 would spill.
#if MHA_CPU_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kVectors = 4;
constexpr int kBroadcasts[kVectors + 1] = {0, 16, 12, 8, 6};  // by the number of vectors
#else
constexpr int kVectors = 2;
constexpr int kBroadcasts[kVectors + 1] = {0, 12, 6};
#endif
constexpr int kBlock = kBroadcasts[kVectors];

// A count in parts of nearly equal size, none above a limit: 64 in parts of 6 end in 5 + 5, where 6 + 4 would leave a
// micro-kernel with too few sums.
class EvenParts {
 public:
  MHA_INLINE EvenParts(int count, int limit) : parts_((count + limit - 1) / limit) {
    size_ = parts_ > 0 ? count / parts_ : 0;
    larger_ = count - size_ * parts_;
  }
  MHA_INLINE int parts() const { return parts_; }
  MHA_INLINE int begin(int part) const { return part * size_ + (part < larger_ ? part : larger_); }
  MHA_INLINE int size(int part) const { return size_ + (part < larger_); }

 private:
  int parts_, size_, larger_;
};

// From a run-time size 1 .. kMax to a constant.
template <int kMax, typename Call>
MHA_INLINE void with_size(int size, const Call& call) {
  if constexpr (kMax > 1) {
    if (size < kMax) return with_size<kMax - 1>(size, call);
  }
  call.template run<kMax>();
}

// What the lanes hold that a micro-kernel multiplies. The other choice is Pairs of pairs.h.
struct Floats {
  using Element = float;           // of a row of keys
  static constexpr int kStep = 1;  // elements, or keys, that one product sums up

  static MHA_INLINE Vec broadcast_key(const float* from) { return broadcast(*from); }
  static MHA_INLINE Vec add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

// Not inlined, as the other micro-kernels: each needs all registers to itself.
template <typename Unit, int kKeys, int kVecs>
__attribute__((noinline)) void score_block(const typename Unit::Element* key, int64_t key_stride, const float* queries,
                                           int head_dim, float factor, float* scores, float* largest) {
  constexpr int kSummed = 128;  // elements that one sum takes: of longer ones the rounding grows
  Vec sum[kKeys][kVecs] = {};
  for (int begin = 0; begin < head_dim; begin += kSummed) {
    if (begin > 0) {
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          store(scores + k * kScoreStride + v * kLanes, sum[k][v]);
          sum[k][v] = Vec{};
        }
      }
    }
    const int end = head_dim - begin < kSummed ? head_dim : begin + kSummed;
    for (int d = begin; d < end; d += Unit::kStep) {
      Vec query[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) query[v] = load(queries + v * kLanes);
#pragma GCC unroll 16
      for (int k = 0; k < kKeys; ++k) {
        const Vec each = Unit::broadcast_key(key + k * key_stride + d);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[k][v] = Unit::add(each, query[v], sum[k][v]);
      }
      queries += kTileRows;
    }
  }
  if (head_dim > kSummed) {  // at most two
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[k][v] += load(scores + k * kScoreStride + v * kLanes);
    }
  }
  if constexpr (Unit::kStep > 1) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[k][v] *= broadcast(factor);
    }
  }
  Vec top[kVecs] = {};
  if (largest) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) top[v] = load(largest + v * kLanes);
  }
#pragma GCC unroll 16
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      store(scores + k * kScoreStride + v * kLanes, sum[k][v]);
      top[v] = max(top[v], sum[k][v]);
    }
  }
  if (!largest) return;
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) store(largest + v * kLanes, top[v]);
}

template <typename Unit>
struct ScoreBlockOf {
  const typename Unit::Element* key;
  int64_t key_stride;
  const float* queries;  // (steps of head_dim, kTileRows)
  int head_dim;
  float* scores;  // (keys, kScoreStride)
  int keys;
  float* largest = nullptr;  // of the rows: the largest score so far, where it is wanted
  float factor = 1;          // of the scores, where it is not in the queries: Pairs

  template <int kVecs>
  struct WithKeys {
    const ScoreBlockOf& x;
    template <int kKeys>
    void run() const {
      score_block<Unit, kKeys, kVecs>(x.key, x.key_stride, x.queries, x.head_dim, x.factor, x.scores, x.largest);
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBroadcasts[kVecs]>(keys, WithKeys<kVecs>{*this});
  }
};

using ScoreBlock = ScoreBlockOf<Floats>;

// Rows by vectors of the output that a micro-kernel takes, by the number of vectors of a value row.
struct OutputShape {
  int rows, vectors;
};

MHA_INLINE OutputShape output_shape(int vectors) {
  int wide = std::min(vectors, kVectors);
#if MHA_CPU_VECTOR_BYTES == 64
  // Narrow columns of V stay in the first cache where rows are long: 12 x 2 beats 6 x 4 by up to 3 % at 128 columns,
  // and 3 x 8 by 13 %; 8 x 3 leaves no remainder at 96; 6 x 4 takes all of 64.
  if (vectors >= 8) wide = 2;
  if (vectors == 6) wide = 3;
#endif
  return {kBroadcasts[wide], wide};
}

template <typename T, typename Unit>
struct OutputBlock {
  const float* weights;  // (steps of keys, kScoreStride)
  const float* value;    // (steps of keys, value_stride)
  int64_t value_stride;
  int steps;
  const float* rescale;  // of the rows: what `out` holds is multiplied by it; null: it holds nothing
  float* out;
  int64_t out_stride;
  T* final;             // where the output goes instead, rounded; null: it is not finished
  const float* factor;  // of the rows: what makes the finished output
  int64_t final_stride;
  int rows, vectors;

  template <int kRows, int kVecs>
  MHA_INLINE void block(int first) const {
    Vec sum[kRows][kVecs] = {};
    if (rescale) {
      const float* from = out + first * kLanes;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = load(from + r * out_stride + v * kLanes) * broadcast(rescale[r]);
      }
    }
    const float* weight = weights;
    const float* row = value + first * kLanes;
    const int64_t stride = value_stride;
    for (int left = steps; left > 0; --left) {
      Vec x[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) x[v] = load(row + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec each = broadcast(weight[r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[r][v] = Unit::add(each, x[v], sum[r][v]);
      }
      weight += kScoreStride;
      row += stride;
    }
    if (final) {
      T* to = final + first * kLanes;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          store_rounded(to + r * final_stride + v * kLanes, sum[r][v] * broadcast(factor[r]));
        }
      }
      return;
    }
    float* to = out + first * kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(to + r * out_stride + v * kLanes, sum[r][v]);
    }
  }

  // All columns, kVecs at a time.
  template <int kRows, int kVecs>
  __attribute__((noinline)) void columns(int first) const {
    for (; first + kVecs <= vectors; first += kVecs) block<kRows, kVecs>(first);
    if constexpr (kVecs > 1) {
      if (first < vectors) columns<kRows, kVecs - 1>(first);
    }
  }

  template <int kVecs>
  struct WithRows {
    const OutputBlock& x;
    template <int kRows>
    void run() const {
      x.template columns<kRows, kVecs>(0);
    }
  };

  template <int kVecs>
  void run() const {
    with_size<kBroadcasts[kVecs]>(rows, WithRows<kVecs>{*this});
  }
};

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
