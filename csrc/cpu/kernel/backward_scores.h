// From scores and products of values to gradients: of a block of keys against a tile, with queries in lanes.
//
//   weight     = exp(score - shift) * inverse_sum, dropped: weight' = weight * keep
//   grad_score = weight' * (grad_output . value) - weight * delta
//
// A key that a query does not see has a weight of 0, and then a grad_score of 0 whatever stands there.
#pragma once

#include "cpu/kernel/backward_tile.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/softmax.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// Before softcap: what the gradient of a capped score is multiplied by.
void keep_cap_slopes(const TileState& state, const ScoreBlockState& block, float* slopes) {
  const Vec inverse = broadcast(static_cast<float>(1 / state.params.rule.softcap)), one = broadcast(1.f);
  for (int v = 0; v < state.vectors; ++v) {
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      const int at = k * kScoreStride + v * kLanes;
      const Vec t = tanh(load(state.memory.scores + at) * inverse);
      store(slopes + at, (one - t) * (one + t));
    }
  }
}

MHA_INLINE Vec unless_zero(Vec weight, Vec x) { return weight == Vec{} ? Vec{} : x; }

// Calls use(at, v) for each vector of the block that some row may see, and stores zeros to both arrays elsewhere.
template <typename Use>
MHA_INLINE void for_seen(const TileState& state, const ScoreBlockState& block, float* scores, float* grad_scores,
                         const Use& use) {
  for (int v = 0; v < state.vectors; ++v) {
    const KeyRange keys = block.of_vector[v];
    const auto clear = [&](int begin, int end) {
      for (int k = begin; k < end; ++k) {
        store(scores + k * kScoreStride + v * kLanes, Vec{});
        store(grad_scores + k * kScoreStride + v * kLanes, Vec{});
      }
    };
    clear(0, keys.begin);
    for (int k = keys.begin; k < keys.end; ++k) use(k * kScoreStride + v * kLanes, v);
    clear(keys.end, block.keys);
  }
}

// Scores become weights, and products with values gradients of the scores.
void differentiate_softmax(const TileState& state, const ScoreBlockState& block, BackwardScratch& memory) {
  float *scores = state.memory.scores, *grad_scores = memory.grad_scores;
  const auto weight_of = [&](int at, int v) {
    // At most 0 but for rounding, in a forward that summed up in another order. A hidden key stays 0 in a row of NaN.
    const Vec below = max(Vec{}, load(memory.shift + v * kLanes) - load(scores + at));
    const Vec exponential = exp_of_negative(-below);
    return unless_zero(exponential, exponential * load(memory.inverse_sum + v * kLanes));
  };
  if (!state.params.dropout.rng_state) {
    for_seen(state, block, scores, grad_scores, [&](int at, int v) {
      const Vec weight = weight_of(at, v);
      store(scores + at, weight);
      const Vec change = load(grad_scores + at) - load(memory.delta + v * kLanes);
      store(grad_scores + at, unless_zero(weight, weight * change));
    });
    return;
  }
  for_seen(state, block, scores, grad_scores, [&](int at, int v) {
    const Vec weight = weight_of(at, v);
    store(scores + at, weight);
    store(memory.weights + at, weight);
  });
  drop_weights(state, {scores, 1, kScoreStride, block.first, block.keys});
  for (int v = 0; v < state.vectors; ++v) {
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      const int at = k * kScoreStride + v * kLanes;
      const Vec weight = load(memory.weights + at), delta = load(memory.delta + v * kLanes);
      const Vec change = fma(load(scores + at), load(grad_scores + at), -(weight * delta));
      store(grad_scores + at, unless_zero(weight, change));
    }
  }
}

// score = .. - slope * |p - j|
void add_slope_gradients(const TileState& state, const ScoreBlockState& block, BackwardScratch& memory) {
  for (int v = 0; v < state.vectors; ++v) {
    const IntVec position = load(state.rows.position + v * kLanes);
    Vec sum = load(memory.slope_sums + v * kLanes);
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      const IntVec ahead = broadcast(block.first + k) - position;
      const Vec distance = __builtin_convertvector(ahead < IntVec{} ? -ahead : ahead, Vec);
      sum = fma(-distance, load(memory.grad_scores + k * kScoreStride + v * kLanes), sum);
    }
    store(memory.slope_sums + v * kLanes, sum);
  }
}

// To the rows of the mask's gradient that the tile's rows have, or share. bias: of the block's first key.
void add_bias_gradients(const TileState& state, const ScoreBlockState& block, BackwardScratch& memory, float* bias) {
  bool shared = true;
  for (int r = 1; r < state.count; ++r) shared &= memory.bias_offset[r] == memory.bias_offset[0];
  if (shared) {
    for (int k = 0; k < block.keys; ++k) {
      const float* of_key = memory.grad_scores + k * kScoreStride;
      Vec sum = {};
      int r = 0;
      for (; r + kLanes <= state.count; r += kLanes) sum += load(of_key + r);
      float rest = 0;
      for (; r < state.count; ++r) rest += of_key[r];
      bias[memory.bias_offset[0] + k] += sum_lanes(sum) + rest;
    }
    return;
  }
  int whole = 0;  // keys whose columns became rows
  for (; whole + kTransposed <= block.keys; whole += kTransposed) {
    const float* from[kTransposed];
    for (int i = 0; i < kTransposed; ++i) from[i] = memory.grad_scores + (whole + i) * kScoreStride;
    transpose_rows<kBiasStride>(from, state.vectors * kLanes, 1.f, memory.bias_rows + whole);
  }
  for (int r = 0; r < state.count; ++r) {
    float* to = bias + memory.bias_offset[r];
    const float* from = memory.bias_rows + r * kBiasStride;
    const KeyRange keys = block.of_vector[r / kLanes];
    int k = keys.begin;
    for (; k + kLanes <= keys.end && k + kLanes <= whole; k += kLanes) store(to + k, load(to + k) + load(from + k));
    for (; k < keys.end; ++k) to[k] += memory.grad_scores[k * kScoreStride + r];
  }
}

void apply_cap_slopes(const TileState& state, const ScoreBlockState& block, BackwardScratch& memory) {
  for (int v = 0; v < state.vectors; ++v) {
    for (int k = block.of_vector[v].begin; k < block.of_vector[v].end; ++k) {
      float* at = memory.grad_scores + k * kScoreStride + v * kLanes;
      const Vec gradient = load(at);
      store(at, unless_zero(gradient, gradient * load(memory.cap_slopes + k * kScoreStride + v * kLanes)));
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
