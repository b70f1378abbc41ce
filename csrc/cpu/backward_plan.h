// How the backward of a call is cut into items of work for threads.
//
// An item is a run of the keys of one key head, against every query that sees them: the gradients of these keys and
// values are its own. Where a head has several runs, each leaves a part of the gradient of the queries, and the parts
// are added up in the end. Heads whose gradient of the mask is the same memory go one after the other. Everything here
// follows from the sizes of a call alone, so that the results do not depend on the number of threads.
#pragma once

#include "cpu/work_plan.h"

namespace mha_ext::cpu {

constexpr int64_t kWantedItems = 32;         // enough for every thread to find work until the end
constexpr int64_t kWantedBiasParts = 8;      // a part costs memory of the size of the mask, and time to add up
constexpr int64_t kRunKeys = 2 * kTileKeys;  // fewer keys are not worth a run of their own
constexpr int64_t kMaxRunKeys = 512 * kTileKeys;
constexpr int64_t kMaxRuns = 8;                  // each leaves a part as large as the gradient of the queries
constexpr int64_t kMaxBiasPartFloats = 1 << 24;  // of all parts of the gradient of the mask
constexpr int kAccumulatorAlign = 16;            // floats: whole vectors of every target

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

struct BackwardPlan {
  WorkPlan queries;
  int64_t runs = 1, run_keys = 0;  // of the keys of a head
  // Key heads whose gradients of the mask lie apart, in `batch_slices` x `head_slices`. Those that share one, `members`
  // of them, are dealt out over `bias_parts`: each part is a gradient of its own, added up in the end.
  int64_t batch_slices = 1, head_slices = 1, members = 1, bias_parts = 1;
  int64_t member_heads = 1;        // of the members, those of one item of the batch
  float* query_parts = nullptr;    // (runs, batch, num_heads_q, seqlen_q, head_dim) fp32 where runs > 1
  int64_t accumulator_floats = 0;  // that a thread adds up gradients of keys and values in, where they are not fp32 or
                                   // their rows not whole vectors

  int64_t chains() const { return batch_slices * head_slices * bias_parts; }
  int64_t items() const { return runs * chains(); }
};

inline BackwardPlan plan_backward(const AttentionBackwardParams& params) {
  const AttentionParams& forward = params.forward;
  BackwardPlan plan;
  plan.queries = plan_tiles(forward);
  const bool has_bias = params.bias_batch > 0;  // a gradient of the mask is wanted, of which the pointer may be missing
  const bool shares_batch = has_bias && params.bias_batch == 1, shares_heads = has_bias && params.bias_heads == 1;
  plan.batch_slices = shares_batch ? 1 : forward.batch;
  plan.head_slices = shares_heads ? 1 : forward.num_heads_kv;
  plan.member_heads = forward.num_heads_kv / plan.head_slices;
  plan.members = forward.batch / plan.batch_slices * plan.member_heads;
  const auto parts = [](int64_t wanted, int64_t have, int64_t most) {
    return std::clamp<int64_t>((wanted + have - 1) / have, 1, std::max<int64_t>(most, 1));
  };
  const int64_t slices = plan.batch_slices * plan.head_slices;
  if (has_bias) {
    const int64_t bias = params.bias_batch * params.bias_heads * params.bias_rows * forward.seqlen_kv;
    plan.bias_parts =
        parts(kWantedBiasParts, slices, std::min(plan.members, kMaxBiasPartFloats / std::max<int64_t>(bias, 1)));
  }
  int64_t seqlen_kv = forward.cu_seqlens_k ? 0 : forward.seqlen_kv;  // of the longest sequence
  for (int64_t b = 0; forward.cu_seqlens_k && b < forward.batch; ++b) {
    seqlen_kv = std::max(seqlen_kv, sequence_rows(forward.cu_seqlens_k, b, forward.seqlen_kv).length);
  }
  plan.runs = parts(kWantedItems, plan.chains(), std::min(seqlen_kv / kRunKeys, kMaxRuns));
  plan.runs = std::max(plan.runs, (seqlen_kv + kMaxRunKeys - 1) / kMaxRunKeys);
  plan.run_keys = round_up(std::max<int64_t>((seqlen_kv + plan.runs - 1) / plan.runs, 1), kTileKeys);
  plan.runs = std::max<int64_t>((seqlen_kv + plan.run_keys - 1) / plan.run_keys, 1);
  const auto in_place = [&](int width) { return forward.dtype == DType::kFloat32 && width % kAccumulatorAlign == 0; };
  if (!in_place(forward.head_dim) || !in_place(forward.head_dim_v)) {
    const int64_t keys = std::min(plan.run_keys, round_up(seqlen_kv, kTileKeys));
    plan.accumulator_floats =
        keys * (round_up(forward.head_dim, kAccumulatorAlign) + round_up(forward.head_dim_v, kAccumulatorAlign));
  }
  return plan;
}

}  // namespace mha_ext::cpu
