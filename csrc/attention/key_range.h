// Which keys a tile of queries visits, and which queries a tile of keys: by window and key length alone.
//
// Both leave a band along the diagonal of the scores, here for a tile of four queries under window=(2, 1):
//
//            j  0 1 2 3 4 5 6 7 8 9
//   query 0     . x x x x . . . . .     lower = 1, upper = 5
//         1     . . x x x x . . . .
//         2     . . . x x x x . . .     some query sees keys 1 .. 7: the others are never loaded
//         3     . . . . x x x x . .     all of them see key 4: where a tile holds only such keys, nothing is masked
#pragma once

#include "attention/mask.h"

namespace mha_ext {

// Query first + row sees the keys lower + row <= j < upper + row that are at least 0 and below key_end.
// All fit 32 bits, as do lower + row and upper + row: what is unlimited lies kMaxAxis away.
struct Band {
  int lower, upper, key_end;

  MHA_HOST_DEVICE bool in_bounds(int row, int j) const { return j >= lower + row && j < upper + row && j < key_end; }
};

MHA_HOST_DEVICE Band score_band(const ScoreRuleParams& params, int64_t b, int64_t first, int64_t seqlen_kv) {
  const int64_t position = query_position(params, b, first);
  constexpr int64_t kFar = 2 * kMaxAxis;
  int64_t lower = -kMaxAxis, upper = kMaxAxis, key_end = seqlen_kv;
  if (params.window_left >= 0) lower = position - clamp(params.window_left, 0, kFar);
  if (params.window_right >= 0) upper = position + clamp(params.window_right, 0, kFar) + 1;
  if (params.key_lengths) key_end = clamp(params.key_lengths[b], 0, seqlen_kv);
  return {static_cast<int>(clamp(lower, -kMaxAxis, kMaxAxis)), static_cast<int>(clamp(upper, -kMaxAxis, kMaxAxis)),
          static_cast<int>(key_end)};
}

// What a run of places on one axis of the scores sees of the other axis.
struct VisibleRange {
  int begin, end;            // some of them see these; begin >= end: nothing is seen
  int full_begin, full_end;  // all of them see these

  MHA_HOST_DEVICE bool empty() const { return begin >= end; }

  // In tiles of `block`: the visited ones are first_tile() <= tile < end_tile().
  MHA_HOST_DEVICE int first_tile(int block) const { return begin / block; }
  MHA_HOST_DEVICE int end_tile(int block) const { return (end + block - 1) / block; }

  // No score is hidden in the tiles first_full_tile() <= tile < end_full_tile().
  MHA_HOST_DEVICE int first_full_tile(int block) const { return (full_begin + block - 1) / block; }
  MHA_HOST_DEVICE int end_full_tile(int block) const { return full_end > 0 ? full_end / block : 0; }
  MHA_HOST_DEVICE bool is_full(int tile, int block) const {
    return tile >= first_full_tile(block) && tile < end_full_tile(block);
  }
};

// The keys that the band's first `queries` queries see.
MHA_HOST_DEVICE VisibleRange visible_keys(const Band& band, int queries) {
  const auto from = [&](int lower) { return lower > 0 ? lower : 0; };
  const auto to = [&](int upper) { return upper < band.key_end ? upper : band.key_end; };
  return {from(band.lower), to(band.upper + queries - 1), from(band.lower + queries - 1), to(band.upper)};
}

// The queries 0 <= i < seqlen_q that see the keys first <= j <= last. band: that of query 0.
MHA_HOST_DEVICE VisibleRange visible_queries(const Band& band, int first, int last, int seqlen_q) {
  const auto begin_of = [&](int j) { return static_cast<int>(clamp(int64_t{j} - band.upper + 1, 0, seqlen_q)); };
  const auto end_of = [&](int j) { return static_cast<int>(clamp(int64_t{j} - band.lower + 1, 0, seqlen_q)); };
  if (first >= band.key_end) return {0, 0, 0, 0};
  const bool any_hidden = last >= band.key_end;
  const int last_visible = any_hidden ? band.key_end - 1 : last;
  return {begin_of(first), end_of(last_visible), any_hidden ? seqlen_q : begin_of(last), end_of(first)};
}

}  // namespace mha_ext
