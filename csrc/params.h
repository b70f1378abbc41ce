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

// What a pass over attn_mask found, in blocks of kMaskBlock queries by kMaskBlock keys: see kernels/mask_blocks.cuh.
// Strides count elements of each array, and are 0 where attn_mask repeats an axis.
constexpr int kMaskBlock = 64;

enum class BlockVisibility : uint8_t { kNone, kSome, kAll };

struct MaskBlocks {
  const uint64_t* bits;  // (batch, heads_q, seqlen_q, key_blocks): bit j % 64 of word j / 64 is set where key j is
                         // visible; bits beyond the last key are 0. Null unless attn_mask is bool
  Strides3 bits_strides;
  const BlockVisibility* map;  // (batch, heads_q, query_blocks, key_blocks); rows beyond the last query do not count,
                               // keys beyond the last are hidden. Null unless attn_mask is bool
  Strides3 map_strides;
  const uint64_t* key_bits;  // (batch, heads_kv, key_blocks), where attn_mask repeats the query axis, else null: keys
                             // that some query head of the key head sees. The others may hold NaN and read as zeros
  int64_t key_bits_batch_stride, key_bits_head_stride;
};

struct MaskBlocksParams {
  const void* attn_mask;  // (batch, heads_q, seqlen_q, seqlen_kv) as attention reads it
  Strides4 mask_strides;
  DType mask_dtype;
  uint64_t* bits;        // (mask_batch, mask_heads, mask_rows, key_blocks) contiguous, or null
  BlockVisibility* map;  // (mask_batch, mask_heads, mask_query_blocks, key_blocks) contiguous, or null
  uint64_t* key_bits;    // (mask_batch, heads_kv where mask_heads > 1, else 1, key_blocks) contiguous, or null
  int64_t mask_batch, mask_heads, mask_rows;  // 1 on axes that attn_mask repeats
  int64_t seqlen_kv;
  int group;  // query heads a key head
};

// Fused attention. Fixed length: (batch, heads, seqlen, head_dim). Packed: (total, heads, head_dim) seen as (1, heads,
// total, head_dim) with batch strides of 0; batch b then owns the rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1, clamped
// to the tensor.
struct AttentionParams {
  const void* query;                                   // (batch, num_heads_q, seqlen_q, head_dim)
  const void* key;                                     // (batch, num_heads_kv, seqlen_kv, head_dim)
  const void* value;                                   // (batch, num_heads_kv, seqlen_kv, head_dim_v)
  void* output;                                        // (batch, num_heads_q, seqlen_q, head_dim_v)
  Strides3 query_strides, key_strides, value_strides;  // rows of 16-bit and fp32 inputs start on 16 bytes
  Strides3 output_strides;
  float* lse;        // (batch, num_heads_q, seqlen_q): natural logarithm of the denominator, -inf where there is none;
                     // on the CPU null where nobody asks for it
  float* row_stats;  // (batch, num_heads_q, seqlen_q, 2): what scores are taken relative to, and log2 of the sum of
                     // exp(score - that), sink included: lse would lose the latter in a row of finfo.min. (0, 0) where
                     // no key is visible. Null in a forward that no backward follows
  float* max_score;  // the shape of lse, or null: the largest visible score
  float* entropy;    // the shape of lse, or null: of the weights, in nats
  int64_t row_batch_stride, row_head_stride;  // of lse, max_score, entropy; row_stats has twice these
  const int32_t* cu_seqlens_q;                // (batch + 1) or null
  const int32_t* cu_seqlens_k;                // (batch + 1), null where cu_seqlens_q is
  int64_t batch, seqlen_q, seqlen_kv;         // packed: seqlen is the total
  int num_heads_q, num_heads_kv, head_dim, head_dim_v;
  float scale;
  bool allow_tf32;  // fp32 only
  DType dtype;
  ScoreRuleParams rule;  // a float attn_mask has col stride 1, an even pitch, and is fp32 or of dtype
  MaskBlocks mask_blocks;
  DropoutParams dropout;
};

struct AttentionBackwardParams {
  AttentionParams forward;  // output, lse and row_stats are read; max_score and entropy are null
  const void* grad_output;  // (batch, num_heads_q, seqlen_q, head_dim_v)
  Strides3 grad_output_strides;
  const float* grad_lse;  // the shape of lse, contiguous like it, or null
  void* grad_query;  // of the shapes of query, key, value; every element is written but those of rows that no sequence
                     // owns
  void* grad_key;
  void* grad_value;
  Strides3 grad_query_strides, grad_key_strides, grad_value_strides;
  float* delta;  // workspace, the shape of lse: sum_j P dP - grad_lse = rowsum(grad_output * output) - grad_lse
  float* grad_sink_rows;  // the shape of lse, or null: exp(sink - lse) * (grad_lse - rowsum), 0 where lse = -inf
  float* grad_slopes;     // (batch, num_heads_q, slope_partials) or null: parts of the slopes' gradients
  int64_t slope_partials;
  float*
      grad_bias;  // fp32, contiguous, of attn_mask's own shape (bias_batch, bias_heads, bias_rows, seqlen_kv), or null
  int64_t bias_batch, bias_heads, bias_rows;  // 1 on axes that attn_mask repeats
  void* workspace;  // attention_backward_workspace() bytes, the first of which it wants zeroed
};

}  // namespace mha_ext
