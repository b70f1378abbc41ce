// The operators of fused attention: check -> allocate -> fill params -> call a launcher.
// Their schemas are in bindings.cpp; what they compute is said in mha_ext/fused.py and mha_ext/reference.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace mha_ext {

// (output, lse, row_stats, max_score, entropy); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& q_offsets,
    const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& rng_state, const std::optional<at::Tensor>& cu_seqlens_q,
    const std::optional<at::Tensor>& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right,
    double softcap, double dropout_p, double scale, bool allow_tf32, bool for_backward, bool return_stats);

// (grad_query, grad_key, grad_value, grad_mask, grad_slopes, grad_sinks); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& output, const at::Tensor& lse,
    const at::Tensor& row_stats, const std::optional<at::Tensor>& attn_mask,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& q_offsets,
    const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& rng_state, const std::optional<at::Tensor>& cu_seqlens_q,
    const std::optional<at::Tensor>& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right,
    double softcap, double dropout_p, double scale, bool allow_tf32, bool packed, bool mask_grad, bool slopes_grad,
    bool sinks_grad);

}  // namespace mha_ext
