// Which keys a query sees, and what its score becomes. One rule for every kernel:
//
//   score(i, j) = softcap(raw) + bias - slope * |p - j|     with p = i + q_offset, softcap(x) = c * tanh(x / c)
//   visible     = p - window_left <= j <= p + window_right  and  j < key_length  and  mask is true (or not -inf)
//
// A key that is not visible has the score -inf, whatever its raw score is, NaN included.
// Causal is window_right = 0. What is constant along a row is worked out once, in row_rule().
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/online_softmax.h"
#include "host_device.h"
#include "params.h"

namespace mha_ext {

// Queries and keys: at most this many, so that positions and columns fit 32 bits.
constexpr int64_t kMaxAxis = int64_t{1} << 30;

MHA_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : (x > high ? high : x); }

// Where query i stands among the keys. An offset beyond kMaxAxis, which is beyond any key, counts as kMaxAxis.
MHA_HOST_DEVICE int query_position(const ScoreRuleParams& params, int64_t b, int64_t i) {
  const int64_t offset = params.q_offsets ? params.q_offsets[b] : params.q_offset;
  return static_cast<int>(i) + static_cast<int>(clamp(offset, -kMaxAxis, kMaxAxis));
}

// The rule for one query. T is the type in which scores are computed.
template <typename T>
struct RowRule {
  int begin, end;          // window and length leave the keys begin <= j < end; only the mask can hide more
  int position;            // p
  int64_t mask_offset;     // of (b, h, i, 0) in attn_mask, in elements
  T softcap, inv_softcap;  // 0: none
  T slope;                 // 0: none

  MHA_HOST_DEVICE bool in_bounds(int j) const { return j >= begin && j < end; }

  MHA_HOST_DEVICE T distance(int j) const {
    const uint32_t ahead = static_cast<uint32_t>(j) - static_cast<uint32_t>(position);
    return static_cast<T>(j < position ? 0u - ahead : ahead);
  }

  MHA_HOST_DEVICE T capped(T raw) const { return softcap * std::tanh(raw * inv_softcap); }

  // d capped(raw) / d raw = 1 - tanh^2
  MHA_HOST_DEVICE T capped_slope(T raw) const {
    const T t = std::tanh(raw * inv_softcap);
    return (T(1) - t) * (T(1) + t);
  }
};

// A score under a bool mask, and under a mask that is added.
template <typename T>
MHA_HOST_DEVICE T masked(T score, bool visible) {
  return visible ? score : -kInfinity<T>;
}

template <typename T>
MHA_HOST_DEVICE T masked(T score, T bias) {
  return bias == -kInfinity<T> ? bias : score + bias;
}

template <typename T>
MHA_HOST_DEVICE RowRule<T> row_rule(const ScoreRuleParams& params, int64_t b, int64_t h, int64_t i, int64_t seqlen_kv) {
  RowRule<T> rule;
  rule.position = query_position(params, b, i);

  int64_t begin = 0, end = seqlen_kv;
  constexpr int64_t kFar = 2 * kMaxAxis;  // no key is farther from any position
  if (params.window_left >= 0) begin = clamp(rule.position - clamp(params.window_left, 0, kFar), 0, seqlen_kv);
  if (params.window_right >= 0) end = clamp(rule.position + clamp(params.window_right, 0, kFar) + 1, 0, seqlen_kv);
  if (params.key_lengths) end = clamp(params.key_lengths[b], 0, end);
  rule.begin = static_cast<int>(begin);
  rule.end = static_cast<int>(end > begin ? end : begin);

  rule.mask_offset = b * params.mask_strides.batch + h * params.mask_strides.head + i * params.mask_strides.row;
  rule.softcap = static_cast<T>(params.softcap);
  rule.inv_softcap = params.softcap != 0 ? static_cast<T>(1 / params.softcap) : T(0);
  rule.slope = T(0);
  if (params.alibi_slopes) {
    const int64_t at = b * params.alibi_batch_stride + h * params.alibi_head_stride;
    rule.slope = static_cast<const T*>(params.alibi_slopes)[at];
  }
  return rule;
}

// Whether a score is more than scale times a product. A bool mask, the window and the key length only hide.
MHA_HOST_DEVICE bool changes_scores(const ScoreRuleParams& params) {
  return params.alibi_slopes || params.softcap != 0 || (params.attn_mask && params.mask_dtype != DType::kBool);
}

// The sink of a head, -inf when there is none.
template <typename T>
MHA_HOST_DEVICE T row_sink(const ScoreRuleParams& params, int64_t h) {
  return params.sinks ? static_cast<const T*>(params.sinks)[h] : -kInfinity<T>;
}

}  // namespace mha_ext
