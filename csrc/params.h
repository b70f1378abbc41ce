// What every kernel is given: plain structs, no torch, no ownership.
// Each pointer carries its shape; strides count elements and are 64-bit; a stride of 0 repeats an axis.
#pragma once

#include <cstdint>

namespace mha_ext {

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

// Strides of a (batch, head, row, col) tensor whose last axis is contiguous.
struct Strides3 {
  int64_t batch, head, row;
};

// Strides of a (batch, head, row, col) tensor of any layout.
struct Strides4 {
  int64_t batch, head, row, col;
};

// query, key, value <- packed + bias, and back.
struct QkvSplitParams {
  const void* packed;  // (batch, seqlen, (num_heads_q + 2 * num_heads_kv) * head_dim)
  const void* bias;    // ((num_heads_q + 2 * num_heads_kv) * head_dim) or null
  void* query;         // (batch, num_heads_q, seqlen, head_dim), contiguous
  void* key;           // (batch, num_heads_kv, seqlen, head_dim), contiguous
  void* value;         // (batch, num_heads_kv, seqlen, head_dim), contiguous
  int64_t packed_batch_stride, packed_row_stride;
  int64_t batch, seqlen;
  int num_heads_q, num_heads_kv, head_dim;
  DType dtype;
};

struct QkvMergeParams {
  const void* grad_query;  // (batch, num_heads_q, seqlen, head_dim)
  const void* grad_key;    // (batch, num_heads_kv, seqlen, head_dim)
  const void* grad_value;  // (batch, num_heads_kv, seqlen, head_dim)
  Strides3 query_strides, key_strides, value_strides;
  void* grad_packed;   // (batch, seqlen, (num_heads_q + 2 * num_heads_kv) * head_dim), contiguous
  void* bias_partial;  // (num_row_chunks, columns of grad_packed) fp32 (fp64 for fp64), or null
  int64_t batch, seqlen;
  int num_row_chunks;
  int num_heads_q, num_heads_kv, head_dim;
  DType dtype;
};

// c[b, h] = alpha * op(a[b, h']) @ op(b[b, h'']), summed over a group of heads where group_sum > 1.
struct MatmulParams {
  const void* a;  // (batch, heads_a, m, k), or (batch, heads_a, k, m) when transpose_a
  const void* b;  // (batch, heads_b, k, n), or (batch, heads_b, n, k) when transpose_b
  void* c;        // (batch, heads_c, m, n)
  Strides3 a_strides, b_strides, c_strides;
  int64_t batch, heads_c, m, n, k;
  const int64_t* k_lengths;  // (batch) or null: elements k < length take part
  // Output head h reads a-head h * group_sum / a_divisor + s and b-head h * group_sum / b_divisor + s,
  // s = 0 .. group_sum - 1, and adds up the products. At most one of the divisors and group_sum exceeds 1.
  int a_divisor, b_divisor, group_sum;
  double alpha;
  bool transpose_a, transpose_b;
  bool allow_tf32;  // fp32 only: round the inputs to TF32 and use the tensor cores
  DType in_dtype, out_dtype;
};

// Which scores a query sees and what is added to them: see attention/mask.h for the rule itself.
struct ScoreRuleParams {
  const void* attn_mask;       // (batch, heads, seqlen_q, seqlen_kv) bool or float, or null
  Strides4 mask_strides;       // broadcast axes have stride 0
  DType mask_dtype;            // kBool: true takes part; otherwise added to the scores
  const int64_t* key_lengths;  // (batch) or null: keys j < length are visible
  const int64_t* q_offsets;    // (batch) or null: replaces q_offset
  const void* alibi_slopes;    // (batch, heads) fp32 (fp64), or null
  int64_t alibi_batch_stride, alibi_head_stride;
  const void* sinks;                  // (heads) contiguous fp32 (fp64), or null
  int64_t q_offset;                   // query i stands at position i + q_offset
  int64_t window_left, window_right;  // -1: unlimited on that side
  double softcap;                     // 0: none
};

// The same bits for every backend: see attention/dropout.h.
struct DropoutParams {
  const int64_t* rng_state;  // (2): seed, offset; null: no dropout
  uint32_t threshold;        // a weight is kept when its 32 random bits are >= threshold ...
  bool drop_all;             // ... and none is when p = 1
  double keep_scale;         // 1 / (1 - p)
};

struct MaskedSoftmaxParams {
  const void* scores;  // (batch, heads, seqlen_q, seqlen_kv)
  Strides3 scores_strides;
  void* weights;  // (batch, heads, seqlen_q, seqlen_kv)
  void* dropped;  // the weights after dropout, with the strides of weights, or null
  Strides3 weights_strides;
  void* lse;        // (batch, heads, seqlen_q) contiguous, accumulation type
  void* max_score;  // the same, or null
  void* entropy;    // the same, or null
  int64_t batch, heads, seqlen_q, seqlen_kv;
  DType scores_dtype, weights_dtype;
  ScoreRuleParams rule;
  DropoutParams dropout;
};

struct MaskedSoftmaxBackwardParams {
  const void* grad_weights;  // (batch, heads, seqlen_q, seqlen_kv) or null
  Strides3 grad_weights_strides;
  DType grad_weights_dtype;
  const void* grad_dropped;  // the same, or null
  Strides3 grad_dropped_strides;
  DType grad_dropped_dtype;
  const void* grad_lse;  // (batch, heads, seqlen_q) contiguous, accumulation type, or null
  const void* weights;   // (batch, heads, seqlen_q, seqlen_kv), before dropout
  Strides3 weights_strides;
  DType weights_dtype;
  const void* scores;  // the raw scores where rule.softcap != 0, else null
  Strides3 scores_strides;
  DType scores_dtype;
  const void* lse;    // (batch, heads, seqlen_q) contiguous, accumulation type
  void* grad_scores;  // (batch, heads, seqlen_q, seqlen_kv)
  void* grad_bias;    // gradient of what is added after softcap, with the strides of grad_scores, or null
  Strides3 grad_scores_strides;
  DType grad_dtype;
  void* grad_sink_rows;   // (batch, heads, seqlen_q) contiguous, accumulation type, or null
  void* grad_slope_rows;  // the same, or null
  int64_t batch, heads, seqlen_q, seqlen_kv;
  ScoreRuleParams rule;  // only softcap, sinks, q_offset and q_offsets are read
  DropoutParams dropout;
};

}  // namespace mha_ext
