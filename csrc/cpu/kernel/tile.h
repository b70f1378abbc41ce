// A tile at work: what is known of its rows, and the memory that a thread computes in.
#pragma once

#include <memory>

#include "cpu/kernel/elements.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kRowVectors = kTileRows / kLanes;
constexpr int kRowGroups = (kTileRows + kBlock - 1) / kBlock;  // rows that a micro-kernel of the output takes together

struct KeyRange {
  int begin, end;

  MHA_INLINE bool empty() const { return begin >= end; }
  MHA_INLINE KeyRange within(int low, int high) const { return {begin > low ? begin : low, end < high ? end : high}; }
};

// Arrays over the rows of a tile. Rows beyond the last are of no query: they see nothing and are never written.
struct alignas(64) Rows {
  int32_t begin[kTileRows], end[kTileRows];  // window and length leave these keys
  int32_t position[kTileRows];
  float slope[kTileRows];
  float max[kTileRows];       // the largest score so far
  float sum[kTileRows];       // of exp(score - shift), where shift is softmax_shift(max)
  float weighted[kTileRows];  // of exp(score - shift) * (score - shift): for the entropy
  float rescale[kTileRows];   // what the output so far is multiplied by
  float factor[kTileRows];    // what makes the finished output of the sum so far
  int64_t mask_offset[kTileRows];
  int head[kTileRows], query[kTileRows];
};

struct alignas(64) Scratch {
  Rows rows;
  float queries[kMaxHeadDim * kTileRows];  // scale * query: (head_dim, kTileRows)
  float scores[kTileKeys * kScoreStride];  // (keys, kScoreStride)
  float out[kTileRows * kMaxHeadDim];      // (rows, value_width)
  float key[kTileKeys * kMaxHeadDim];      // (keys, head_dim) in fp32 where it lies in 16 bits
  float value[kTileKeys * kMaxHeadDim];    // (keys, value_width) in fp32 where it cannot be read in place
  float query_rows[4 * kMaxHeadDim];       // on their way into `queries`
  float mask[kTileKeys * kScoreStride];    // what a mask adds to the scores
  float mask_rows[4 * kMaxHeadDim];        // on their way into `mask`
  uint8_t seen[kTileKeys];                 // by some row, under a mask that all queries share
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own(new Scratch);
  return *own;
}

struct TileState {
  const AttentionParams& params;
  const Tile& tile;
  Scratch& memory;
  Rows& rows;
  int count;        // of rows
  int vectors;      // that hold them
  int value_width;  // head_dim_v, rounded up to whole vectors
  KeyRange keys;    // that some row sees
  KeyRange full;    // that all rows see
  bool has_output;  // whether `out` holds anything
};

constexpr KeyRange kNoKeys = {std::numeric_limits<int>::max(), std::numeric_limits<int>::min()};

MHA_INLINE void widen(KeyRange& range, int begin, int end) {
  if (begin >= end) return;
  range.begin = begin < range.begin ? begin : range.begin;
  range.end = end > range.end ? end : range.end;
}

// The keys that some of the rows first .. last - 1 see.
MHA_INLINE KeyRange keys_of_rows(const Rows& rows, int first, int last) {
  KeyRange range = kNoKeys;
  for (int r = first; r < last; ++r) widen(range, rows.begin[r], rows.end[r]);
  return range;
}

template <typename T>
MHA_INLINE const T* row_of(const void* tensor, const Strides3& strides, int64_t b, int64_t h, int64_t row) {
  return static_cast<const T*>(tensor) + b * strides.batch + h * strides.head + row * strides.row;
}

void start_rows(TileState& state) {
  const Tile& tile = state.tile;
  Rows& rows = state.rows;
  const ScoreRuleParams& rule = state.params.rule;
  state.keys = kNoKeys;
  state.full = {0, static_cast<int>(tile.seqlen_kv)};
  int r = 0;
  for (int h = tile.first_head; h < tile.first_head + tile.heads; ++h) {
    for (int i = tile.first_query; i < tile.first_query + tile.queries; ++i, ++r) {
      const RowRule<float> row = row_rule<float>(rule, tile.batch, h, i, tile.seqlen_kv);
      rows.begin[r] = row.begin;
      rows.end[r] = row.end;
      rows.position[r] = row.position;
      rows.slope[r] = row.slope;
      rows.mask_offset[r] = row.mask_offset;
      rows.head[r] = h;
      rows.query[r] = i;
      widen(state.keys, row.begin, row.end);
      state.full = state.full.within(row.begin, row.end);
    }
  }
  for (; r < state.vectors * kLanes; ++r) {
    rows.begin[r] = rows.end[r] = rows.position[r] = 0;
    rows.slope[r] = 0;
  }
  for (r = 0; r < state.vectors * kLanes; ++r) {
    rows.max[r] = -kInfinity<float>;
    rows.sum[r] = rows.weighted[r] = 0;
  }
}

// Four rows of `from` (stride kFromStride) into four columns of `to` (stride kStride), times scale.
template <int kStride, int kFromStride = kMaxHeadDim>
MHA_INLINE void transpose_four(const float* from, int head_dim, float scale, float* to) {
  int d = 0;
#if defined(__x86_64__)
  const __m128 factor = _mm_set1_ps(scale);
  for (; d + 4 <= head_dim; d += 4) {
    __m128 a = _mm_loadu_ps(from + d), b = _mm_loadu_ps(from + kFromStride + d);
    __m128 c = _mm_loadu_ps(from + 2 * kFromStride + d), e = _mm_loadu_ps(from + 3 * kFromStride + d);
    _MM_TRANSPOSE4_PS(a, b, c, e);
    _mm_storeu_ps(to + d * kStride, _mm_mul_ps(a, factor));
    _mm_storeu_ps(to + (d + 1) * kStride, _mm_mul_ps(b, factor));
    _mm_storeu_ps(to + (d + 2) * kStride, _mm_mul_ps(c, factor));
    _mm_storeu_ps(to + (d + 3) * kStride, _mm_mul_ps(e, factor));
  }
#endif
  for (; d < head_dim; ++d) {
    for (int r = 0; r < 4; ++r) to[d * kStride + r] = from[r * kFromStride + d] * scale;
  }
}

template <typename T>
const T* query_row(const TileState& state, int r) {
  return row_of<T>(state.params.query, state.params.query_strides, state.tile.batch, state.rows.head[r],
                   state.tile.query_start + state.rows.query[r]);
}

template <typename T>
void load_queries(const TileState& state) {
  const AttentionParams& params = state.params;
  Scratch& memory = state.memory;
  const int head_dim = params.head_dim;
  for (int r = 0; r < state.vectors * kLanes; r += 4) {
    for (int i = 0; i < 4; ++i) {
      float* to = memory.query_rows + i * kMaxHeadDim;
      if (r + i < state.count) {
        read_row(query_row<T>(state, r + i), head_dim, head_dim, to);
      } else {
        std::memset(to, 0, head_dim * sizeof(float));
      }
    }
    transpose_four<kTileRows>(memory.query_rows, head_dim, params.scale, memory.queries + r);
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
