// The running softmax of a tile: a block of scores becomes weights relative to the largest score so far, and what came
// before is rescaled.
#pragma once

#include "cpu/kernel/functions.h"
#include "cpu/kernel/scores.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

MHA_INLINE Vec shift_of(Vec max) { return max == broadcast(-kInfinity<float>) ? Vec{} : max; }

// exp or, where scores are in units of log(2), 2 to the power of x <= 0.
template <bool kLog2>
MHA_INLINE Vec power_of(Vec x) {
  return kLog2 ? exp2_of_negative(x) : exp_of_negative(x);
}

// exp(score - shift) and, for the entropy, that times (score - shift).
template <bool kStats, bool kLog2 = false>
MHA_INLINE void weigh(float* at, Vec shift, Vec& sum, Vec& weighted) {
  const Vec x = load(at) - shift, weight = power_of<kLog2>(x);
  store(at, weight);
  sum += weight;
  if (kStats) weighted += weight == Vec{} ? Vec{} : weight * x;
}

// The largest of a column of vectors and of what was there before.
MHA_INLINE Vec max_of_column(const float* column, KeyRange keys, Vec before) {
  Vec largest[2] = {before, before};
  int k = keys.begin;
  for (; k + 2 <= keys.end; k += 2) {
    largest[0] = max(largest[0], load(column + k * kScoreStride));
    largest[1] = max(largest[1], load(column + (k + 1) * kScoreStride));
  }
  if (k < keys.end) largest[0] = max(largest[0], load(column + k * kScoreStride));
  return max(largest[0], largest[1]);
}

template <bool kStats, bool kLog2>
void weigh_block(const TileState& state, const ScoreBlockState& block) {
  Rows& rows = state.rows;
  for (int v = block.first_vector; v < block.end_vector; ++v) {
    float* column = state.memory.scores + v * kLanes;
    const KeyRange keys = block.of_vector[v];
    // Some row of a group that spans two vectors may see these.
    for (int k = 0; k < (keys.empty() ? block.keys : keys.begin); ++k) store(column + k * kScoreStride, Vec{});
    for (int k = keys.empty() ? block.keys : keys.end; k < block.keys; ++k) store(column + k * kScoreStride, Vec{});
    const int at = v * kLanes;
    if (keys.empty()) {
      store(rows.rescale + at, broadcast(1.f));
      continue;
    }
    const Vec old_max = load(rows.max + at);
    Vec new_max = load(rows.largest + at);
    if (block.is_changed(state.params.rule) || block.is_bounded(rows, v))
      new_max = max_of_column(column, keys, old_max);
    const Vec shift = shift_of(new_max);
    const Vec rescale = power_of<kLog2>(old_max - shift), old_sum = load(rows.sum + at);
    Vec sum = {}, weighted = {};
    for (int k = keys.begin; k < keys.end; ++k) weigh<kStats, kLog2>(column + k * kScoreStride, shift, sum, weighted);
    if (kStats) {
      const Vec moved = load(rows.weighted + at) + old_sum * (shift_of(old_max) - shift);
      store(rows.weighted + at, rescale * moved + weighted);
    }
    store(rows.max + at, new_max);
    store(rows.largest + at, new_max);
    store(rows.sum + at, rescale * old_sum + sum);
    store(rows.rescale + at, rescale);
  }
}

inline void update_softmax(const TileState& state, const ScoreBlockState& block) {
  if (state.in_log2) {
    state.params.entropy ? weigh_block<true, true>(state, block) : weigh_block<false, true>(state, block);
  } else {
    state.params.entropy ? weigh_block<true, false>(state, block) : weigh_block<false, false>(state, block);
  }
}

// What the softmax knows of the rows, in natural units again.
inline void leave_log2(TileState& state) {
  if (!state.in_log2) return;
  state.in_log2 = false;
  for (int r = 0; r < state.vectors * kLanes; ++r) {
    state.rows.max[r] *= kLn2;
    state.rows.weighted[r] *= kLn2;
  }
}

// The weights of a tile's rows for the keys first .. first + keys - 1.
struct Weights {
  float* data;
  int64_t row_stride, key_stride;
  int first, keys;
};

// The draw of attention/dropout.h: one call serves keys j and j + 8 of a row.
void drop_weights(const TileState& state, const Weights& block) {
  const DropoutParams& dropout = state.params.dropout;
  const DropoutSeed seed = dropout_seed(dropout.rng_state);
  const float keep_scale = static_cast<float>(dropout.keep_scale);
  const int end = block.first + block.keys;
  for (int r = 0; r < state.count; ++r) {
    const int i = state.rows.query[r];
    const auto batch_head = static_cast<uint32_t>(state.tile.batch * state.params.num_heads_q + state.rows.head[r]);
    float* weights = block.data + r * block.row_stride;
    for (int tile = block.first & ~15; tile < end; tile += 16) {
      for (int j = tile; j < tile + 8; ++j) {
        const RandomWords words = random_words(seed, batch_head, i, j);
        for (int each = j; each <= j + 8; each += 8) {
          if (each < block.first || each >= end) continue;
          float& weight = weights[(each - block.first) * block.key_stride];
          weight = keeps(dropout, words.word[random_word(i, each)]) ? weight * keep_scale : 0;
        }
      }
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
