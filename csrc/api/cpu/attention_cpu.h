// The operator of attention on CPU tensors: check -> allocate -> fill params -> share the work out among threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "params.h"

namespace mha_ext {

// (output, lse, row_stats, max_score, entropy); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& q_offsets,
    const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& rng_state, const std::optional<at::Tensor>& cu_seqlens_q,
    const std::optional<at::Tensor>& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right,
    double softcap, double dropout_p, double scale, bool allow_tf32, bool for_backward, bool return_stats);

constexpr int64_t kMaxCpuHeadDim = 256;

// query, key, value, attn_mask and cu_seqlens of either direction.
void check_attention_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& cu_seqlens_q,
                             const std::optional<at::Tensor>& cu_seqlens_k);

// (batch, heads, rows, cols) in memory as its model lies there: rows outside of heads, or heads outside of rows.
at::Tensor empty_like_layout(const at::Tensor& model, int64_t cols);

// What a call consists of so far: its tensors (batch, heads, length, head dim), and no rule.
AttentionParams attention_params(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& output, double scale);

// Of the two products without a mask.
double flops_of(const AttentionParams& params);

void compute_attention(const AttentionParams& params);

}  // namespace mha_ext
