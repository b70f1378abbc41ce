// The operators behind the unfused path: check -> allocate -> fill params -> call a launcher.
// Their schemas are in bindings.cpp; what they compute is said in mha_ext/ops.py and mha_ext/reference.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace mha_ext {

// (query, key, value), contiguous.
std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_split(const at::Tensor& packed,
                                                         const std::optional<at::Tensor>& bias, int64_t num_heads,
                                                         int64_t num_kv_heads);

// (grad_packed, grad_bias); grad_bias is empty unless bias_grad.
std::tuple<at::Tensor, at::Tensor> qkv_merge(const at::Tensor& grad_query, const at::Tensor& grad_key,
                                             const at::Tensor& grad_value, bool bias_grad);

// alpha * op(a) @ op(b), by heads; k ends at k_lengths, by batch.
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, bool transpose_a, bool transpose_b, double alpha,
                  int64_t num_heads_out, at::ScalarType out_dtype, bool allow_tf32,
                  const std::optional<at::Tensor>& k_lengths);

// (weights, dropped, lse, max_score, entropy); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_softmax(
    const at::Tensor& scores, const std::optional<at::Tensor>& attn_mask, const std::optional<at::Tensor>& key_lengths,
    const std::optional<at::Tensor>& q_offsets, const std::optional<at::Tensor>& alibi_slopes,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& rng_state, int64_t q_offset,
    int64_t window_left, int64_t window_right, double softcap, double dropout_p, at::ScalarType out_dtype,
    bool return_stats);

// (grad_scores, grad_bias, grad_sink_rows, grad_slope_rows); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_softmax_backward(
    const std::optional<at::Tensor>& grad_weights, const std::optional<at::Tensor>& grad_dropped,
    const std::optional<at::Tensor>& grad_lse, const at::Tensor& weights, const std::optional<at::Tensor>& scores,
    const at::Tensor& lse, const std::optional<at::Tensor>& q_offsets, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& rng_state, int64_t q_offset, double softcap, double dropout_p,
    at::ScalarType grad_dtype, bool bias_grad, bool sink_grad, bool slope_grad);

}  // namespace mha_ext
