// What fp32 attention does with a tile of scores as it lies in the accumulators: the mask rule and dropout. Forward and
// dQ have queries in the rows of a tile, dK and dV keys.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/dropout.h"
#include "attention/key_range.h"
#include "attention/mask.h"
#include "device/fragment.h"
#include "kernels/attention_tiles.cuh"

namespace mha_ext {

enum class ScoreRows { kQueries, kKeys };

// A warp's scores. A lane holds those of kQueries queries and kKeys keys.
template <ScoreRows kRows, int kMmaM_, int kMmaN_>
struct ScoreTile {
  static constexpr int kMmaM = kMmaM_, kMmaN = kMmaN_;
  static constexpr bool kQueriesInRows = kRows == ScoreRows::kQueries;
  static constexpr int kQueries = 2 * (kQueriesInRows ? kMmaM : kMmaN);
  static constexpr int kKeys = 2 * (kQueriesInRows ? kMmaN : kMmaM);

  float acc[kMmaM][kMmaN][4];

  __device__ __forceinline__ float& of(int row, int col) { return acc[row / 2][col / 2][row % 2 * 2 + col % 2]; }
  __device__ __forceinline__ float& at(int query, int key) { return kQueriesInRows ? of(query, key) : of(key, query); }

  // The row and column of the tile that a lane's row-th row and col-th column are.
  static constexpr MHA_HOST_DEVICE int row_place(int lane, int row) {
    return row / 2 * kFragmentRows + accumulator_row(lane, row % 2 * 2);
  }
  static constexpr MHA_HOST_DEVICE int col_place(int lane, int col) {
    return col / 2 * 8 + accumulator_col(lane, col % 2);
  }
  static constexpr MHA_HOST_DEVICE int query_place(int lane, int query) {
    return kQueriesInRows ? row_place(lane, query) : col_place(lane, query);
  }
  static constexpr MHA_HOST_DEVICE int key_place(int lane, int key) {
    return kQueriesInRows ? col_place(lane, key) : row_place(lane, key);
  }
};

// ---- the mask rule ----

// Whether a score is scale times a product, and scale > 0: then the largest product is the largest score.
__device__ __forceinline__ bool has_plain_scores(const AttentionParams& p) {
  return p.scale > 0 && !changes_scores(p.rule);
}

// The rule of one batch. Made where it is needed: it would take many registers.
struct BatchRule {
  Band band;  // of query 0
  RowRule<float> first_row;
  const float *bias, *slopes;  // null: none
  int64_t bias_head_stride, bias_row_stride, slope_stride;
  float scale;

  __device__ __forceinline__ BatchRule(const AttentionParams& p, int batch, int seqlen_kv)
      : band(score_band(p.rule, batch, 0, seqlen_kv)),
        first_row(row_rule<float>(p.rule, batch, 0, 0, seqlen_kv)),
        bias(p.rule.mask_dtype == DType::kBool ? nullptr : static_cast<const float*>(p.rule.attn_mask)),
        slopes(static_cast<const float*>(p.rule.alibi_slopes)),
        bias_head_stride(p.rule.mask_strides.head),
        bias_row_stride(p.rule.mask_strides.row),
        slope_stride(p.rule.alibi_head_stride),
        scale(p.scale) {
    if (slopes) slopes += batch * p.rule.alibi_batch_stride;
  }

  __device__ __forceinline__ RowRule<float> row(int head, int query) const {
    RowRule<float> rule = first_row;
    rule.begin = band.lower + query;
    rule.end = min(band.upper + query, band.key_end);
    rule.position += query;
    rule.mask_offset += head * bias_head_stride + query * bias_row_stride;
    if (slopes) rule.slope = slopes[head * slope_stride];
    return rule;
  }

  // The score of a key in bounds.
  __device__ __forceinline__ float score(const RowRule<float>& rule, float product, int key) const {
    float score = product * scale;
    if (rule.softcap != 0) score = rule.capped(score);
    if (bias) score = masked(score, bias[rule.mask_offset + key]);
    if (slopes) score -= rule.slope * rule.distance(key);
    return score;
  }
};

// What queries first .. last of some heads see of a tile of keys, which lies within one block of the mask.
__device__ __forceinline__ BlockVisibility mask_of_tile(const MaskBlocks& mask, int batch, int head, int heads,
                                                        int first, int last, int key) {
  if (!mask.map) return BlockVisibility::kAll;
  const BlockVisibility visibility = mask_block(mask, batch, head, first / kMaskBlock, key / kMaskBlock);
  for (int h = 0; h < (mask.map_strides.head ? heads : 1); ++h) {
    for (int block = first / kMaskBlock; block <= last / kMaskBlock; ++block) {
      if (mask_block(mask, batch, head + h, block, key / kMaskBlock) != visibility) return BlockVisibility::kSome;
    }
  }
  return visibility;
}

// Bit k: whether a query sees key `key` + k, if that lies in the same block of the mask.
__device__ __forceinline__ uint64_t mask_bits(const MaskBlocks& mask, int batch, int head, int query, int key) {
  return mask_word(mask, batch, head, query, key / kMaskBlock) >> (key % kMaskBlock);
}

// ---- loads ----

// Row 0 of a sequence, of a (batch, head, row, col) tensor.
__device__ __forceinline__ const float* sequence_rows(const void* tensor, const Strides3& strides, int batch, int head,
                                                      const Sequence& sequence) {
  return static_cast<const float*>(tensor) + batch * strides.batch + head * strides.head + sequence.first * strides.row;
}

// Loads the keys from `key` on, zeros for those that are hidden from everyone here and may hold anything.
template <typename Loader>
__device__ __forceinline__ void load_visible_keys(const Loader& loader, uint32_t tile, int key,
                                                  const VisibleRange& visible, const MaskBlocks& mask, int batch,
                                                  int head_kv) {
  const int begin = visible.begin - key, end = visible.end - key;
  if (!mask.key_bits && begin <= 0 && end >= Loader::kRows) {
    loader.load(tile, key);
  } else {
    const uint64_t seen = key_word(mask, batch, head_kv, key / kMaskBlock) >> (key % kMaskBlock);
    loader.load_where(tile, key, [&](int row) { return row >= begin && row < end && (seen >> row & 1); });
  }
}

// ---- dropout ----

// Visits each score with whether dropout keeps it. query, key: of the tile, multiples of 16.
template <typename Tile, typename Visit>
__device__ __forceinline__ void visit_dropout(const DropoutParams& dropout, uint32_t batch_head, int query, int key,
                                              int lane, Visit visit) {
  const DropoutSeed seed = dropout_seed(dropout.rng_state);
  // One call serves rows 8 apart, a lane's neighbours, and columns 8 apart, those of neighbouring mma tiles.
#pragma unroll
  for (int row = 0; row < 2 * Tile::kMmaM; row += 2) {
#pragma unroll
    for (int col = 0; col < 2 * Tile::kMmaN; col += col % 2 ? 3 : 1) {
      const int query_0 = Tile::kQueriesInRows ? row : col, key_0 = Tile::kQueriesInRows ? col : row;
      const RandomWords words =
          random_words(seed, batch_head, query + Tile::query_place(lane, query_0), key + Tile::key_place(lane, key_0));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        constexpr int kQueryStep = Tile::kQueriesInRows ? 1 : 2, kKeyStep = 3 - kQueryStep;
        visit(query_0 + word / 2 * kQueryStep, key_0 + word % 2 * kKeyStep, keeps(dropout, words.word[word]));
      }
    }
  }
}

// ---- launches ----

// Calls run(products, head_dim) with constants.
template <typename Run>
void dispatch_tf32(const AttentionParams& p, Run run) {
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  const auto run_with = [&](auto products) {
    if (head_dim <= 64) return run(products, std::integral_constant<int, 64>{});
    if (head_dim <= 128) return run(products, std::integral_constant<int, 128>{});
    return run(products, std::integral_constant<int, 256>{});
  };
  p.allow_tf32 ? run_with(std::integral_constant<int, 1>{}) : run_with(std::integral_constant<int, 3>{});
}

}  // namespace mha_ext
