// The operator of attention on CPU tensors: check -> allocate -> fill params -> share the work out among threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace mha_ext {

// (output, lse, row_stats, max_score, entropy); what was not asked for is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
    const std::optional<at::Tensor>& key_lengths, const std::optional<at::Tensor>& q_offsets,
    const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& rng_state, const std::optional<at::Tensor>& cu_seqlens_q,
    const std::optional<at::Tensor>& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right,
    double softcap, double dropout_p, double scale, bool allow_tf32, bool for_backward, bool return_stats);

}  // namespace mha_ext
