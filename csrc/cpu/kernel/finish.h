// A finished row: its output divided by the sum, its logarithm and statistics; and rows of several splits put together.
#pragma once

#include "cpu/kernel/functions.h"
#include "cpu/kernel/softmax.h"
#include "cpu/kernel/tile.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

// From what the softmax has seen of each row: rows.factor for its output, and what is returned of it.
void finish_softmax(const TileState& state) {
  const AttentionParams& params = state.params;
  Rows& rows = state.rows;
  alignas(64) float sink[kTileRows], lse[kTileRows], entropy[kTileRows];
  alignas(64) float shift_rows[kTileRows], log2_sum[kTileRows];
  for (int r = 0; r < state.vectors * kLanes; ++r) {
    sink[r] = r < state.count ? row_sink<float>(params.rule, rows.head[r]) : -kInfinity<float>;
  }
  const Vec none = broadcast(-kInfinity<float>), one = broadcast(1.f);
  for (int at = 0; at < state.vectors * kLanes; at += kLanes) {
    const Vec row_max = load(rows.max + at), sum = load(rows.sum + at), row_sink = load(sink + at);
    const Vec shift = shift_of(row_max), new_shift = shift_of(max_with_nan(row_max, row_sink));
    const Vec delta = row_max == none ? Vec{} : shift - new_shift, moved = exp_of_negative(delta);
    const Vec key_sum = moved * sum, total = key_sum + exp_of_negative(row_sink - new_shift);
    // A row without a key has a total of 0, one that saw NaN or +inf has NaN.
    const Vec log_total = log(total > Vec{} ? total : one), bad = total == total ? Vec{} : total;
    store(rows.factor + at, bad + (total > Vec{} ? moved / total : Vec{}));
    store(lse + at, bad + (total > Vec{} ? new_shift + log_total : none));
    store(shift_rows + at, total > Vec{} ? new_shift : Vec{});
    store(log2_sum + at, bad + (total > Vec{} ? log_total * broadcast(kLog2E) : Vec{}));
    if (params.entropy) {
      const Vec weighted = moved * fma(sum, delta, load(rows.weighted + at));
      store(entropy + at, bad + (total > Vec{} ? (log_total * key_sum - weighted) / total : Vec{}));
      const Vec infinite = broadcast(kInfinity<float>);
      store(rows.max + at, row_max == infinite ? row_max : row_max + bad);
    }
  }
  for (int r = 0; r < state.count; ++r) {
    const int64_t to = state.tile.batch * params.row_batch_stride + rows.head[r] * params.row_head_stride +
                       state.tile.query_start + rows.query[r];
    if (params.lse) params.lse[to] = lse[r];
    if (params.row_stats) {
      params.row_stats[2 * to] = shift_rows[r];
      params.row_stats[2 * to + 1] = log2_sum[r];
    }
    if (!params.entropy) continue;
    params.max_score[to] = rows.max[r];
    params.entropy[to] = entropy[r];
  }
}

template <typename T>
T* output_row(const TileState& state, int r) {
  const Strides3& strides = state.params.output_strides;
  return static_cast<T*>(state.params.output) + state.tile.batch * strides.batch + state.rows.head[r] * strides.head +
         (state.tile.query_start + state.rows.query[r]) * strides.row;
}

// After finish_softmax: the outputs that `out` holds.
template <typename T>
void write_outputs(const TileState& state) {
  for (int r = 0; r < state.count; ++r) {
    if (state.has_output) {
      write_row(state.memory.out + r * state.value_width, state.rows.factor[r], state.params.head_dim_v,
                output_row<T>(state, r));
    } else {
      std::memset(output_row<T>(state, r), 0, state.params.head_dim_v * sizeof(T));
    }
  }
}

void store_partial(const TileState& state, const WorkPlan& plan, int64_t unit) {
  const Rows& rows = state.rows;
  for (int r = 0; r < state.count; ++r) {
    float* to = plan.partial + (unit * plan.max_rows + r) * plan.partial_stride;
    to[0] = rows.max[r];
    to[1] = rows.sum[r];
    to[2] = rows.weighted[r];
    if (state.has_output) {
      std::memcpy(to + kPartialHead, state.memory.out + r * state.value_width, state.params.head_dim_v * sizeof(float));
    } else {
      std::memset(to + kPartialHead, 0, state.params.head_dim_v * sizeof(float));
    }
  }
}

template <typename T>
void merge_tile(TileState& state, const WorkPlan& plan, int64_t tile_index) {
  Rows& rows = state.rows;
  const int width = state.params.head_dim_v;
  for (int r = 0; r < state.count; ++r) {
    float* out = state.memory.out + r * state.value_width;
    const auto partial = [&](int split) {
      return plan.partial + ((tile_index * plan.splits + split) * plan.max_rows + r) * plan.partial_stride;
    };
    float max = -kInfinity<float>, sum = 0, weighted = 0;
    for (int split = 0; split < plan.splits; ++split) max = max_or_nan(max, partial(split)[0]);
    const float shift = softmax_shift(max);
    std::memset(out, 0, width * sizeof(float));
    for (int split = 0; split < plan.splits; ++split) {
      const float* part = partial(split);
      if (part[0] == -kInfinity<float> && part[1] == 0) continue;  // saw no key
      const float delta = softmax_shift(part[0]) - shift, factor = std::exp(delta);
      sum += factor * part[1];
      weighted += factor * (part[2] + part[1] * delta);
      for (int d = 0; d < width; ++d) out[d] += factor * part[kPartialHead + d];
    }
    rows.max[r] = max;
    rows.sum[r] = sum;
    rows.weighted[r] = weighted;
  }
  state.has_output = true;
  finish_softmax(state);
  write_outputs<T>(state);
}

}  // namespace
}  // namespace mha_ext::cpu::MHA_CPU_TARGET
