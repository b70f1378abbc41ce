// From S = K Q^T and dP = V dO^T of a tile to P and dS, in the place of S and dP.
//
//   P  = exp(score - lse)       what dropout keeps of it goes into dV
//   dS = P (dP - delta)         0 where the score is hidden, whatever dP is
//
// Rows are keys, columns queries: acc[i][j][r] is key 16 i + 8 (r / 2) and query 8 j + r % 2 beyond the lane's first.
#pragma once

#include "attention/dropout.h"
#include "attention/key_range.h"
#include "device/ptx/math.h"
#include "kernels/attention_tiles.cuh"

namespace mha_ext {

// Of the queries of a tile, in shared memory.
template <int kBlockM>
struct QueryStats {
  float shift[kBlockM];
  float neg_log2_sum[kBlockM];               // of exp(score - shift); plain scores: of exp(score)
  alignas(16) float neg_delta[2 * kBlockM];  // x0 x1 x0 x1 of two neighbours: the four of an accumulator

  // A lane has a row, neighbours have neighbours.
  template <bool kGeneral>
  __device__ __forceinline__ void store(int row, const float2& row_stats, float delta) {
    if constexpr (kGeneral) {
      shift[row] = row_stats.x;
      neg_log2_sum[row] = -row_stats.y;
    } else {
      neg_log2_sum[row] = fmaf(row_stats.x, -kLog2E, -row_stats.y);
    }
    const float other = __shfl_xor_sync(kAllLanes, delta, 1);
    reinterpret_cast<float2*>(neg_delta)[row] =
        row % 2 == 0 ? make_float2(-delta, -other) : make_float2(-other, -delta);
  }
};

// A lane's place in a tile: its first query, within the tile and in the sequence, and its first key.
struct LaneScores {
  int row, query, key;
};

// ---- plain scores ----

// What the sum of dP starts from, so that it becomes dP - delta.
template <int kBlockM, int kMmaM>
__device__ __forceinline__ void start_at_delta(float (&grads)[2][kMmaM][4], const QueryStats<kBlockM>& stats,
                                               const LaneScores& at) {
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
    const float4 start = *reinterpret_cast<const float4*>(stats.neg_delta + 2 * (at.row + 8 * j));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      grads[i][j][0] = start.x;
      grads[i][j][1] = start.y;
      grads[i][j][2] = start.z;
      grads[i][j][3] = start.w;
    }
  }
}

// grads: dP - delta.
template <int kBlockM, int kMmaM>
__device__ __forceinline__ void plain_gradients(float (&scores)[2][kMmaM][4], float (&grads)[2][kMmaM][4],
                                                const QueryStats<kBlockM>& stats, const LaneScores& at, float scale) {
  const float scale_log2 = scale * kLog2E;
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
    const float2 neg_lse = *reinterpret_cast<const float2*>(stats.neg_log2_sum + at.row + 8 * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        scores[i][j][r] = ptx::ex2(fmaf(scores[i][j][r], scale_log2, r % 2 == 0 ? neg_lse.x : neg_lse.y));
        grads[i][j][r] *= scores[i][j][r];
      }
    }
  }
}

// Window and key length.
template <int kMmaM>
__device__ __forceinline__ void hide_outside(float (&weights)[2][kMmaM][4], float (&grads)[2][kMmaM][4],
                                             const Band& band, const LaneScores& at) {
  const uint32_t lower = static_cast<uint32_t>(band.lower), width = static_cast<uint32_t>(band.upper) - lower;
  const uint32_t ahead = static_cast<uint32_t>(at.key) - static_cast<uint32_t>(at.query) - lower;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaM; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = 16 * i + r / 2 * 8, query = 8 * j + r % 2;
        const bool visible = ahead + key - query < width && at.key + key < band.key_end;
        weights[i][j][r] = visible ? weights[i][j][r] : 0.0f;
        grads[i][j][r] = weights[i][j][r] == 0.0f ? 0.0f : grads[i][j][r];
      }
    }
  }
}

// ---- general scores ----

// Of one tile of queries.
struct GeneralTile {
  int batch, head;
  uint32_t batch_head;  // as dropout numbers heads
  int seqlen_q, seqlen_kv;
  Band band;
  bool outside;  // window or key length hide a part of the tile
  bool masked;   // the bool mask does
  bool slope_grad;
  float softcap, softcap_log2;  // exp(2 scale x / softcap) = 2^(softcap_log2 x)
};

// One of a lane's queries.
struct GeneralQuery {
  float shift, neg_log2_sum, neg_delta;
  int lower, upper;  // the keys it sees, from the lane's first on
  int position;      // from the lane's first key on
  uint32_t bits;     // of the bool mask, bit k: 16 i + 8 half of the lane's keys
  const void* bias;  // at the lane's first key
};

// grads: dP. What comes back in `scores` are weights after dropout. slope_sum: minus the sum of dS |p - j|.
template <typename Element, int kBlockM, int kMmaM>
__device__ __forceinline__ void general_gradients(float (&scores)[2][kMmaM][4], float (&grads)[2][kMmaM][4],
                                                  const QueryStats<kBlockM>& stats, const LaneScores& at,
                                                  const AttentionParams& p, const DropoutSeed& seed,
                                                  const GeneralTile& tile, float& slope_sum) {
  const ScoreRuleParams& rule = p.rule;
  const bool has_bias = rule.attn_mask && rule.mask_dtype != DType::kBool;
  const bool has_slope = rule.alibi_slopes;
  const float slope =
      has_slope ? static_cast<const float*>(
                      rule.alibi_slopes)[tile.batch * rule.alibi_batch_stride + tile.head * rule.alibi_head_stride]
                : 0.0f;
  const float keep_scale = static_cast<float>(p.dropout.keep_scale);

#pragma unroll
  for (int c = 0; c < kMmaM / 2; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Two queries by four keys; a draw of random words serves the two and two of the keys.
      GeneralQuery query[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        const int row = at.row + 16 * c + 8 * q + e, i = at.query + 16 * c + 8 * q + e;
        const int existing = min(i, tile.seqlen_q - 1);
        query[q].shift = stats.shift[row];
        query[q].neg_log2_sum = stats.neg_log2_sum[row];
        query[q].neg_delta = stats.neg_delta[2 * (row & ~1) + (row & 1)];
        query[q].lower = tile.band.lower + i - at.key;
        query[q].upper = min(tile.band.upper + i, tile.band.key_end) - at.key;
        query[q].bits = ~0u;
        if (tile.masked) {
          const int key_block = min(at.key, tile.seqlen_kv - 1) / kMaskBlock;
          query[q].bits = static_cast<uint32_t>(mask_word(p.mask_blocks, tile.batch, tile.head, existing, key_block) >>
                                                (at.key % kMaskBlock));
        }
        if (has_slope) query[q].position = query_position(rule, tile.batch, i) - at.key;
        if (has_bias) {
          const int64_t offset = tile.batch * rule.mask_strides.batch + tile.head * rule.mask_strides.head +
                                 existing * rule.mask_strides.row + at.key;
          query[q].bias =
              static_cast<const unsigned char*>(rule.attn_mask) + offset * (rule.mask_dtype == DType::kFloat32 ? 4 : 2);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RandomWords random = {};
        if (p.dropout.rng_state) {
          random = random_words(seed, tile.batch_head, at.query + 16 * c + e, at.key + 16 * i);
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const GeneralQuery& mine = query[w / 2];
          const int key = 16 * i + w % 2 * 8;
          float& score = scores[i][2 * c + w / 2][w % 2 * 2 + e];
          float& grad = grads[i][2 * c + w / 2][w % 2 * 2 + e];

          bool visible = (mine.bits >> key & 1) != 0;
          if (tile.outside) visible = visible && key >= mine.lower && key < mine.upper;
          float x = score * p.scale, tangent = 1.0f;
          if (tile.softcap != 0) {  // tanh(x) = 1 - u and its derivative u (2 - u), where u = 2 / (exp(2 x) + 1)
            const float u = 2 * ptx::rcp(ptx::ex2(score * tile.softcap_log2) + 1);
            x = tile.softcap * (1 - u);
            tangent = u * (2 - u);
          }
          if (has_bias && visible) {
            const float bias = rule.mask_dtype == DType::kFloat32
                                   ? static_cast<const float*>(mine.bias)[key]
                                   : convert<float>(static_cast<const Element*>(mine.bias)[key]);
            visible = bias != -kInfinity<float>;
            x += bias;
          }
          const float distance = has_slope ? fabsf(static_cast<float>(mine.position - key)) : 0.0f;
          if (has_slope) x = fmaf(-slope, distance, x);

          float weight = ptx::ex2(fmaf(x - mine.shift, kLog2E, mine.neg_log2_sum));
          weight = visible ? weight : 0.0f;
          const float kept = !p.dropout.rng_state ? 1.0f : (keeps(p.dropout, random.word[w]) ? keep_scale : 0.0f);
          score = kept == 0.0f ? 0.0f : weight * kept;
          grad = kept == 0.0f ? 0.0f : grad * kept;
          grad = weight == 0.0f ? 0.0f : weight * (grad + mine.neg_delta);
          if (tile.slope_grad) slope_sum = fmaf(-grad, distance, slope_sum);
          grad *= tangent;
        }
      }
    }
  }
}

}  // namespace mha_ext
