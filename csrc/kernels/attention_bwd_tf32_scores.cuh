// From products to the weights and their gradients, for the fp32 backward:
//
//   P  = exp(score - lse)     what dropout keeps of it goes into dV
//   dS = P (dP - delta)       0 where P is, whatever dP is: the key may be hidden
//
// scores: Q K^T becomes P after dropout. grads: dO V^T becomes the gradient of scale Q K^T. stats_of(q) is what is
// known of a lane's q-th query.
#pragma once

#include "device/ptx/math.h"
#include "kernels/attention_tf32_scores.cuh"

namespace mha_ext {

struct RowStats {
  float shift, log2_sum;  // as the forward left them
  float delta;
};

// Where nothing is hidden, and a score is scale times a product.
template <typename Tile, typename StatsOf>
__device__ __forceinline__ void plain_gradients(Tile& scores, Tile& grads, float scale, StatsOf stats_of) {
#pragma unroll
  for (int q = 0; q < Tile::kQueries; ++q) {
    const RowStats stats = stats_of(q);
#pragma unroll
    for (int k = 0; k < Tile::kKeys; ++k) {
      const float t = scores.at(q, k) * scale - stats.shift;
      scores.at(q, k) = ptx::ex2(t * kLog2E - stats.log2_sum);
      grads.at(q, k) = scores.at(q, k) * (grads.at(q, k) - stats.delta);
    }
  }
}

// A tile of the scores of one head.
struct ScorePlace {
  int batch, head;
  int query, key;     // the first of the tile
  int queries, keys;  // so many exist
  bool has_bits;      // the bool mask hides some of the tile
};

// By the whole rule. slope_sum: where wanted, minus the sum of dS |p - j| is added to it.
template <typename Tile, typename StatsOf>
__device__ __forceinline__ void general_gradients(Tile& scores, Tile& grads, const AttentionParams& p,
                                                  const ScorePlace& place, int lane, StatsOf stats_of, bool with_slope,
                                                  float& slope_sum) {
  const BatchRule rule(p, place.batch, place.keys);

  static_assert(Tile::kQueries * Tile::kKeys <= 32, "a bit for each score of a lane");
  uint32_t kept = ~0u;
  float keep_scale = 1.0f;
  if (p.dropout.rng_state) {
    kept = 0;
    keep_scale = static_cast<float>(p.dropout.keep_scale);
    visit_dropout<Tile>(p.dropout, place.batch * p.num_heads_q + place.head, place.query, place.key, lane,
                        [&](int q, int k, bool keep) { kept |= static_cast<uint32_t>(keep) << (q * Tile::kKeys + k); });
  }

#pragma unroll
  for (int q = 0; q < Tile::kQueries; ++q) {
    const RowStats stats = stats_of(q);
    const int query = place.query + Tile::query_place(lane, q), existing = min(query, place.queries - 1);
    const int lane_key = place.key + Tile::key_place(lane, 0);
    const RowRule<float> row = rule.row(place.head, existing);
    uint64_t seen = ~uint64_t{0};
    if (place.has_bits) {
      seen = mask_bits(p.mask_blocks, place.batch, place.head, existing, place.key) >> Tile::key_place(lane, 0);
    }
    if (query > existing) seen = 0;
#pragma unroll
    for (int k = 0; k < Tile::kKeys; ++k) {
      const int step = Tile::key_place(0, k), key = lane_key + step;
      const float product = scores.at(q, k);
      const bool keep = kept >> (q * Tile::kKeys + k) & 1;

      float weight = 0.0f;
      if (row.in_bounds(key) && (seen >> step & 1)) {
        const float score = rule.score(row, product, key);
        if (score != -kInfinity<float>) weight = ptx::ex2((score - stats.shift) * kLog2E - stats.log2_sum);
      }
      const float grad_weight = keep ? grads.at(q, k) * keep_scale : 0.0f;
      float grad = weight == 0.0f ? 0.0f : weight * (grad_weight - stats.delta);
      if (with_slope) slope_sum -= grad * row.distance(key);
      if (row.softcap != 0 && weight != 0.0f) grad *= row.capped_slope(product * rule.scale);
      scores.at(q, k) = keep ? weight : 0.0f;
      grads.at(q, k) = grad;
    }
  }
}

}  // namespace mha_ext
