// A tile at work: what is known of its rows, and the memory that a thread computes in.
#pragma once

#include "cpu/kernel/elements.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kRowVectors = kTileRows / kLanes;
constexpr int kRowGroups = (kTileRows + kBlock - 1) / kBlock;  // rows that a micro-kernel of the output takes together

struct KeyRange {
  int begin, end;

  MHA_INLINE bool empty() const { return begin >= end; }
  MHA_INLINE KeyRange within(int low, int high) const { return {begin > low ? begin : low, end < high ? end : high}; }
};

// Arrays over the rows of a tile. Rows beyond the last are of no query: their scores are 0, and they are never written.
// A row sees the keys begin <= j < end, none where begin >= end.
struct alignas(64) Rows {
  KeyRange full[kRowVectors];                // keys that all rows of a vector see
  int32_t begin[kTileRows], end[kTileRows];  // window and length leave these keys
  int32_t position[kTileRows];
  float slope[kTileRows];
  float max[kTileRows];       // the largest score so far
  float largest[kTileRows];   // the same, ahead of it by what the products of the block at work have found
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
  float query_rows[8 * kMaxHeadDim];       // on their way into `queries`
  float mask_rows[kLanes * kTileKeys];     // of the mask, of the queries of one vector
  uint8_t seen[kTileKeys];                 // by some row, under a mask that all queries share
};

inline Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own(new Scratch);
  return *own;
}

struct TileState {
  const AttentionParams& params;
  const Tile& tile;
  Scratch& memory;
  Rows& rows;
  int count;             // of rows
  int vectors;           // that hold them
  int value_width;       // head_dim_v, rounded up to whole vectors
  KeyRange keys;         // that some row sees
  KeyRange full;         // that all rows see
  bool has_output;       // whether `out` holds anything
  bool in_log2 = false;  // scores, and with them rows.max and rows.weighted, are multiplied by log2(e)

  const float* packed_values = nullptr;  // of this head, all keys; or null

  // What makes scores of products of query and key.
  MHA_INLINE float product_scale() const { return in_log2 ? params.scale * kLog2E : params.scale; }
};

constexpr KeyRange kNoKeys = {std::numeric_limits<int>::max(), std::numeric_limits<int>::min()};

MHA_INLINE void widen(KeyRange& range, int begin, int end) {
  if (begin >= end) return;
  range.begin = begin < range.begin ? begin : range.begin;
  range.end = end > range.end ? end : range.end;
}

// The keys that some of the rows first .. last - 1 see. Within a head neither bound ever falls.
MHA_INLINE KeyRange keys_of_rows(const Rows& rows, int first, int last) {
  if (rows.head[first] == rows.head[last - 1]) return {rows.begin[first], rows.end[last - 1]};
  KeyRange range = kNoKeys;
  for (int r = first; r < last; ++r) widen(range, rows.begin[r], rows.end[r]);
  return range;
}

// The keys that all of them see.
MHA_INLINE KeyRange full_of_rows(const Rows& rows, int first, int last) {
  if (rows.head[first] == rows.head[last - 1]) return {rows.begin[last - 1], rows.end[first]};
  KeyRange range = {0, std::numeric_limits<int>::max()};
  for (int r = first; r < last; ++r) range = range.within(rows.begin[r], rows.end[r]);
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
  const RowRule<float> first = row_rule<float>(rule, tile.batch, tile.first_head, tile.first_query, tile.seqlen_kv);
  const Band band = score_band(rule, tile.batch, tile.first_query, tile.seqlen_kv);
  const VisibleRange visible = visible_keys(band, tile.queries);
  state.keys = visible.empty() ? kNoKeys : KeyRange{visible.begin, visible.end};
  state.full = {visible.full_begin, visible.full_end};
  int r = 0;
  for (int h = 0; h < tile.heads; ++h) {
    const int64_t mask_offset = first.mask_offset + h * rule.mask_strides.head;
    const float slope = rule.alibi_slopes ? row_rule<float>(rule, tile.batch, tile.first_head + h, 0, 0).slope : 0;
    for (int i = 0; i < tile.queries; ++i) {
      rows.begin[r + i] = std::max(band.lower + i, 0);
      rows.end[r + i] = std::min(band.upper + i, band.key_end);
      rows.position[r + i] = first.position + i;
      rows.slope[r + i] = slope;
      rows.mask_offset[r + i] = mask_offset + i * rule.mask_strides.row;
      rows.head[r + i] = tile.first_head + h;
      rows.query[r + i] = tile.first_query + i;
    }
    r += tile.queries;
  }
  // Of no query: as the last, so that what holds for all rows of a vector is what it is without them.
  for (; r < state.vectors * kLanes; ++r) {
    rows.begin[r] = rows.begin[state.count - 1];
    rows.end[r] = rows.end[state.count - 1];
    rows.position[r] = rows.position[state.count - 1];
    rows.head[r] = rows.head[state.count - 1];
    rows.slope[r] = 0;
  }
  for (r = 0; r < state.vectors * kLanes; ++r) {
    rows.max[r] = rows.largest[r] = -kInfinity<float>;
    rows.sum[r] = rows.weighted[r] = 0;
  }
  for (int v = 0; v < state.vectors; ++v) rows.full[v] = full_of_rows(rows, v * kLanes, (v + 1) * kLanes);
}

#if MHA_CPU_VECTOR_BYTES >= 32
constexpr int kTransposed = 8;

MHA_INLINE void transpose_square(const float* const* from, int at, float scale, float* to, int stride) {
  __m256 row[8], pair[8], four[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from[i] + at);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
    four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
  }
  const __m256 factor = _mm256_set1_ps(scale);
  for (int i = 0; i < 4; ++i) {
    const __m256 low = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
    const __m256 high = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
    _mm256_storeu_ps(to + i * stride, _mm256_mul_ps(low, factor));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_mul_ps(high, factor));
  }
}
#else
constexpr int kTransposed = 4;

MHA_INLINE void transpose_square(const float* const* from, int at, float scale, float* to, int stride) {
#if defined(__x86_64__)
  __m128 a = _mm_loadu_ps(from[0] + at), b = _mm_loadu_ps(from[1] + at);
  __m128 c = _mm_loadu_ps(from[2] + at), d = _mm_loadu_ps(from[3] + at);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  const __m128 factor = _mm_set1_ps(scale);
  _mm_storeu_ps(to, _mm_mul_ps(a, factor));
  _mm_storeu_ps(to + stride, _mm_mul_ps(b, factor));
  _mm_storeu_ps(to + 2 * stride, _mm_mul_ps(c, factor));
  _mm_storeu_ps(to + 3 * stride, _mm_mul_ps(d, factor));
#else
  for (int i = 0; i < 4; ++i) {
    for (int r = 0; r < 4; ++r) to[i * stride + r] = from[r][at + i] * scale;
  }
#endif
}
#endif

// The same for fewer than kTransposed elements of each row.
MHA_INLINE void transpose_rest(const float* const* from, int at, int count, float scale, float* to, int stride) {
  for (int i = 0; i < count; ++i) {
    for (int r = 0; r < kTransposed; ++r) to[i * stride + r] = from[r][at + i] * scale;
  }
}

// kTransposed rows of a length into columns of `to`, times scale.
template <int kStride>
MHA_INLINE void transpose_rows(const float* const* from, int length, float scale, float* to) {
  int at = 0;
  for (; at + kTransposed <= length; at += kTransposed) transpose_square(from, at, scale, to + at * kStride, kStride);
  transpose_rest(from, at, length - at, scale, to + at * kStride, kStride);
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
  const float scale = state.product_scale();
  for (int r = 0; r < state.vectors * kLanes; r += kTransposed) {
    const float* from[kTransposed];
    for (int i = 0; i < kTransposed; ++i) {
      float* copy = memory.query_rows + i * kMaxHeadDim;
      from[i] = copy;
      if (r + i >= state.count) {
        std::memset(copy, 0, head_dim * sizeof(float));
      } else if constexpr (std::is_same_v<T, float>) {
        from[i] = query_row<T>(state, r + i);
        // Rows are too short for the processor to see a pattern.
        if (r + i + kTransposed < state.count) {
          const float* next = query_row<T>(state, r + i + kTransposed);
          for (int d = 0; d < head_dim; d += 16) __builtin_prefetch(next + d);
        }
      } else {
        read_row(query_row<T>(state, r + i), head_dim, head_dim, copy);
      }
    }
    transpose_rows<kTileRows>(from, head_dim, scale, memory.queries + r);
  }
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
