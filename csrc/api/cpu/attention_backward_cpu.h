// The operator of the backward of attention on CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace mha_ext {

// (grad_query, grad_key, grad_value, grad_mask, grad_slopes, grad_sinks); what was not asked for is empty. packed: the
// first is that of (batch, seqlen, (heads + 2 heads_kv) head_dim), and the next two are empty. The same bits whatever
// the number of threads.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward_cpu(
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
