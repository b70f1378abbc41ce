// What happens to scores between the two products, as passes over a warp's accumulators.
//
// acc[i][j][r] is row 16 i + 8 (r / 2) and key 8 j + r % 2 beyond the lane's first: `row` in the tile, `key` in the
// sequence. Each pass that a call may or may not ask for is one branch, which all threads take together.
#pragma once

#include "attention/dropout.h"
#include "attention/mask.h"
#include "attention/online_softmax.h"
#include "device/ptx/math.h"
#include "kernels/attention_query_tile.cuh"

namespace mha_ext {

// change_of(row) gives what happens to the scores of a row: change(score, key) is the new one.
template <int kMmaM, int kMmaN, typename ChangeOf>
__device__ __forceinline__ void change_scores(float (&acc)[kMmaM][kMmaN][4], ChangeOf change_of) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto change = change_of(16 * i + 8 * half);
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) acc[i][j][2 * half + e] = change(acc[i][j][2 * half + e], 8 * j + e);
      }
    }
  }
}

// Window and key length.
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void hide_outside(float (&acc)[kMmaM][kMmaN][4], const QueryTile& tile, int row, int key) {
  change_scores(acc, [&](int r) {
    const int query = tile.query_of(row + r);
    const int begin = tile.band.lower + query - key, end = min(tile.band.upper + query, tile.band.key_end) - key;
    return [=](float score, int k) { return masked(score, k >= begin && k < end); };
  });
}

// ---- general scores ----

// scale * raw, or cap * tanh(scale * raw / cap). tanh(x) = 1 - 2 / (exp(2 x) + 1): its error is one of rounding, where
// that of tanh.approx is a multiple of the cap.
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void scale_scores(float (&acc)[kMmaM][kMmaN][4], float scale, float softcap) {
  if (softcap == 0) return change_scores(acc, [=](int) { return [=](float raw, int) { return raw * scale; }; });
  const float to_exponent = 2 * kLog2E * scale / softcap;
  change_scores(acc, [=](int) {
    return [=](float raw, int) { return fmaf(-2 * softcap, ptx::rcp(ptx::ex2(raw * to_exponent) + 1), softcap); };
  });
}

// A bias: in pairs of neighbours, or one by one in the last tile, where what lies beyond the last key is the last
// key's.
template <typename Bias, int kMmaM, int kMmaN>
__device__ __forceinline__ void add_bias(float (&acc)[kMmaM][kMmaN][4], const AttentionParams& p, const QueryTile& tile,
                                         int row, int key) {
  const Strides4& s = p.rule.mask_strides;
  const bool last_tile = key / kMaskBlock == (tile.keys.length - 1) / kMaskBlock;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = min(row + 16 * i + 8 * half, tile.rows() - 1);
      const Bias* bias = static_cast<const Bias*>(p.rule.attn_mask) + tile.batch * s.batch +
                         (tile.head + tile.head_of(r)) * s.head + (int64_t{tile.first} + tile.query_of(r)) * s.row;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        Pack<Bias, 2> pair;
        if (last_tile) {
#pragma unroll
          for (int e = 0; e < 2; ++e) pair.at[e] = bias[min(key + 8 * j + e, tile.keys.length - 1)];
        } else {
          pair = load_pack<Bias, 2>(bias + key + 8 * j);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = acc[i][j][2 * half + e];
          score = masked(score, convert<float>(pair.at[e]));
        }
      }
    }
  }
}

// -slope |p - j|
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void add_alibi(float (&acc)[kMmaM][kMmaN][4], const ScoreRuleParams& rule,
                                          const QueryTile& tile, int row, int key) {
  const float* slopes = static_cast<const float*>(rule.alibi_slopes) + tile.batch * rule.alibi_batch_stride;
  const int64_t ahead = query_position(rule, tile.batch, tile.first) - key;
  change_scores(acc, [&](int r) {
    const int r_existing = min(row + r, tile.rows() - 1);
    const float slope = slopes[(tile.head + tile.head_of(r_existing)) * rule.alibi_head_stride];
    const float distance = static_cast<float>(ahead + tile.query_of(row + r));
    return [=](float score, int k) { return fmaf(-slope, fabsf(distance - k), score); };
  });
}

// The bool mask, a bit a key.
template <int kMmaM, int kMmaN>
__device__ __forceinline__ void hide_by_bits(float (&acc)[kMmaM][kMmaN][4], const MaskBlocks& mask,
                                             const QueryTile& tile, int row, int key) {
  change_scores(acc, [&](int r) {
    const int r_existing = min(row + r, tile.rows() - 1);
    const uint64_t word = mask_word(mask, tile.batch, tile.head + tile.head_of(r_existing),
                                    int64_t{tile.first} + tile.query_of(r_existing), key / kMaskBlock);
    const uint64_t bits = word >> (key % kMaskBlock);
    return [=](float score, int k) { return masked(score, bits >> k & 1); };
  });
}

// From the raw products of a key tile to scores in natural units. Window and key length come after.
template <typename Element, int kMmaM, int kMmaN>
__device__ __forceinline__ void make_general_scores(float (&acc)[kMmaM][kMmaN][4], const AttentionParams& p,
                                                    const QueryTile& tile, int row, int key, bool masked_by_bits) {
  scale_scores(acc, p.scale, static_cast<float>(p.rule.softcap));
  if (p.rule.attn_mask && p.rule.mask_dtype == DType::kFloat32) {
    add_bias<float>(acc, p, tile, row, key);
  } else if (p.rule.attn_mask && p.rule.mask_dtype != DType::kBool) {
    add_bias<Element>(acc, p, tile, row, key);
  }
  if (p.rule.alibi_slopes) add_alibi(acc, p.rule, tile, row, key);
  if (masked_by_bits) hide_by_bits(acc, p.mask_blocks, tile, row, key);
}

// ---- weights ----

// weight = change(weight, whether dropout keeps it). One draw serves two rows and two keys; see attention/dropout.h.
template <int kMmaM, int kMmaN, typename Change>
__device__ __forceinline__ void apply_dropout(float (&acc)[kMmaM][kMmaN][4], const AttentionParams& p,
                                              const QueryTile& tile, int row, int key, Change change) {
  const DropoutSeed seed = dropout_seed(p.dropout.rng_state);
  const uint32_t batch_head = static_cast<uint32_t>(tile.batch) * p.num_heads_q + tile.head;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RandomWords random = random_words(seed, batch_head, tile.first + row + 16 * i, key + 8 * j + e);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float& weight = acc[i][j + w % 2][w / 2 * 2 + e];
          weight = change(weight, keeps(p.dropout, random.word[w]));
        }
      }
    }
  }
}

}  // namespace mha_ext
