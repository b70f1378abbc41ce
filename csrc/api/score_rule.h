// The operands that every attention operator shares: what changes a score, and dropout. Checked, and as kernels take
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>

#include "api/checks.h"
#include "attention/mask.h"
#include "params.h"

namespace mha_ext {

inline void check_axes(const at::Tensor& tensor, const char* name) {
  for (int64_t size : tensor.sizes()) {
    TORCH_CHECK_VALUE(size <= kMaxAxis, name, ": expected axes of at most ", kMaxAxis, ", got shape ", tensor.sizes());
  }
}

inline void check_softcap(double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), "softcap: expected a finite number >= 0, got ", softcap);
}

// Everything of the rule but attn_mask, for scores of `batch` and `heads` that lie on the device of `like`.
struct ScoreRuleOperands {
  const std::optional<at::Tensor>&key_lengths, &q_offsets, &alibi_slopes, &sinks;
  int64_t q_offset, window_left, window_right;
  double softcap;
};

inline ScoreRuleParams score_rule_params(const ScoreRuleOperands& operands, int64_t batch, int64_t heads,
                                         at::ScalarType row_dtype, const at::Tensor& like, const char* like_name) {
  check_operand(operands.key_lengths, "key_lengths", {batch}, at::kLong, like, like_name);
  check_operand(operands.q_offsets, "q_offsets", {batch}, at::kLong, like, like_name);
  check_operand(operands.sinks, "sinks", {heads}, row_dtype, like, like_name);
  const auto& slopes = operands.alibi_slopes;
  if (slopes) {  // of any strides
    check_shape(*slopes, "alibi_slopes", {batch, heads});
    check_dtype(*slopes, "alibi_slopes", {row_dtype});
    check_device(*slopes, "alibi_slopes", like, like_name);
  }
  TORCH_CHECK_VALUE(operands.window_left >= -1, "window_left: expected -1 (unlimited) or more, got ",
                    operands.window_left);
  TORCH_CHECK_VALUE(operands.window_right >= -1, "window_right: expected -1 (unlimited) or more, got ",
                    operands.window_right);
  check_softcap(operands.softcap);

  ScoreRuleParams params = {};
  params.mask_dtype = DType::kBool;
  params.key_lengths = int64_pointer(operands.key_lengths);
  params.q_offsets = int64_pointer(operands.q_offsets);
  params.alibi_slopes = pointer(slopes);
  params.alibi_batch_stride = slopes ? stride_of(*slopes, 0) : 0;
  params.alibi_head_stride = slopes ? stride_of(*slopes, 1) : 0;
  params.sinks = pointer(operands.sinks);
  params.q_offset = operands.q_offset;
  params.window_left = operands.window_left;
  params.window_right = operands.window_right;
  params.softcap = operands.softcap;
  return params;
}

inline DropoutParams dropout_params(double dropout_p, const std::optional<at::Tensor>& rng_state,
                                    const at::Tensor& like, const char* like_name) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p: expected a number from 0 to 1, got ", dropout_p);
  TORCH_CHECK_VALUE(dropout_p == 0 || rng_state, "rng_state: expected a tensor when dropout_p is ", dropout_p,
                    ", got None");
  check_operand(rng_state, "rng_state", {2}, at::kLong, like, like_name);
  DropoutParams params;
  params.rng_state = int64_pointer(rng_state);
  params.drop_all = dropout_p == 1;
  params.threshold = params.drop_all ? 0 : static_cast<uint32_t>(dropout_p * 4294967296.0);
  params.keep_scale = params.drop_all ? 0 : 1 / (1 - dropout_p);
  return params;
}

}  // namespace mha_ext
