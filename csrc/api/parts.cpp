#include "api/parts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "api/aligned_rows.h"
#include "api/attention.h"
#include "api/checks.h"
#include "api/device.h"
#include "api/score_rule.h"
#include "kernels/masked_softmax.h"
#include "kernels/qkv_split.h"

namespace mha_ext {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// A tensor of rows as long as those of scores. fp64 goes with fp64 alone.
void check_rows(const at::Tensor& tensor, const char* name, const at::Tensor& like, const char* like_name) {
  check_shape(tensor, name, like.sizes());
  if (like.scalar_type() == at::kDouble) {
    check_dtype(tensor, name, {at::kDouble});
  } else {
    check_dtype(tensor, name, {at::kHalf, at::kBFloat16, at::kFloat});
  }
  check_device(tensor, name, like, like_name);
  check_unit_last_stride(tensor, name);
}

// The dtype to return for an operand: fp64 goes with fp64 alone.
void check_result_dtype(at::ScalarType dtype, const char* name, at::ScalarType operand) {
  if (operand == at::kDouble) {
    check_dtype(dtype, name, {at::kDouble});
  } else {
    check_dtype(dtype, name, {at::kHalf, at::kBFloat16, at::kFloat});
  }
}

// Heads of a packed projection: its columns are those of all query heads, then all key heads, then all value heads.
int head_dim_of_packed(const at::Tensor& packed, int64_t num_heads, int64_t num_kv_heads) {
  TORCH_CHECK_VALUE(num_heads > 0, "num_heads: expected a positive number, got ", num_heads);
  TORCH_CHECK_VALUE(num_kv_heads > 0, "num_kv_heads: expected a positive number, got ", num_kv_heads);
  const int64_t heads = num_heads + 2 * num_kv_heads;
  TORCH_CHECK_VALUE(heads <= kMaxAxis && packed.size(2) % heads == 0,
                    "packed: expected a last axis that is a multiple of ", heads,
                    " (num_heads + 2 * num_kv_heads), got ", packed.size(2));
  return static_cast<int>(packed.size(2) / heads);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_split(const at::Tensor& packed, const MaybeTensor& bias,
                                                         int64_t num_heads, int64_t num_kv_heads) {
  check_rank(packed, "packed", 3);
  check_floating(packed, "packed");
  check_axes(packed, "packed");
  check_unit_last_stride(packed, "packed");
  check_operand(bias, "bias", {packed.size(2)}, packed.scalar_type(), packed, "packed");
  const int64_t batch = packed.size(0), seqlen = packed.size(1);
  const int head_dim = head_dim_of_packed(packed, num_heads, num_kv_heads);

  const c10::DeviceGuard guard(packed.device());
  at::Tensor query = at::empty({batch, num_heads, seqlen, head_dim}, packed.options());
  at::Tensor key = at::empty({batch, num_kv_heads, seqlen, head_dim}, packed.options());
  at::Tensor value = at::empty_like(key);

  QkvSplitParams params;
  params.packed = packed.const_data_ptr();
  params.bias = pointer(bias);
  params.query = query.mutable_data_ptr();
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  params.packed_batch_stride = stride_of(packed, 0);
  params.packed_row_stride = stride_of(packed, 1);
  params.batch = batch;
  params.seqlen = seqlen;
  params.num_heads_q = static_cast<int>(num_heads);
  params.num_heads_kv = static_cast<int>(num_kv_heads);
  params.head_dim = head_dim;
  params.dtype = to_dtype(packed.scalar_type());
  launch_qkv_split(params, device::current_stream(packed.device()));
  return {query, key, value};
}

std::tuple<at::Tensor, at::Tensor> qkv_merge(const at::Tensor& grad_query, const at::Tensor& grad_key,
                                             const at::Tensor& grad_value, bool bias_grad) {
  check_rank(grad_query, "grad_query", 4);
  check_rank(grad_key, "grad_key", 4);
  check_floating(grad_query, "grad_query");
  check_axes(grad_query, "grad_query");
  check_axes(grad_key, "grad_key");
  const int64_t batch = grad_query.size(0), num_heads = grad_query.size(1), seqlen = grad_query.size(2);
  const int64_t num_kv_heads = grad_key.size(1), head_dim = grad_query.size(3);
  const int64_t columns = (num_heads + 2 * num_kv_heads) * head_dim;
  TORCH_CHECK_VALUE(columns <= kMaxAxis, "grad_query: expected at most ", kMaxAxis, " columns in all, got ", columns);
  check_unit_last_stride(grad_query, "grad_query");
  const auto check_part = [&](const at::Tensor& grad, const char* name) {
    check_shape(grad, name, {batch, num_kv_heads, seqlen, head_dim});
    check_dtype(grad, name, {grad_query.scalar_type()});
    check_device(grad, name, grad_query, "grad_query");
    check_unit_last_stride(grad, name);
  };
  check_part(grad_key, "grad_key");
  check_part(grad_value, "grad_value");

  const c10::DeviceGuard guard(grad_query.device());
  const int row_chunks = qkv_merge_row_chunks(batch * seqlen);
  const at::ScalarType sum_dtype = accumulator(grad_query.scalar_type());
  at::Tensor grad_packed = at::empty({batch, seqlen, columns}, grad_query.options());
  at::Tensor bias_partial;
  if (bias_grad) bias_partial = at::empty({row_chunks, columns}, grad_query.options().dtype(sum_dtype));

  QkvMergeParams params;
  params.grad_query = grad_query.const_data_ptr();
  params.grad_key = grad_key.const_data_ptr();
  params.grad_value = grad_value.const_data_ptr();
  params.query_strides = strides3(grad_query);
  params.key_strides = strides3(grad_key);
  params.value_strides = strides3(grad_value);
  params.grad_packed = grad_packed.mutable_data_ptr();
  params.bias_partial = bias_grad ? bias_partial.mutable_data_ptr() : nullptr;
  params.batch = batch;
  params.seqlen = seqlen;
  params.num_row_chunks = row_chunks;
  params.num_heads_q = static_cast<int>(num_heads);
  params.num_heads_kv = static_cast<int>(num_kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.dtype = to_dtype(grad_query.scalar_type());
  launch_qkv_merge(params, device::current_stream(grad_query.device()));

  at::Tensor grad_bias =
      bias_grad ? at::sum(bias_partial, {0}).to(grad_query.scalar_type()) : at::empty({0}, grad_query.options());
  return {grad_packed, grad_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_softmax(
    const at::Tensor& scores, const MaybeTensor& attn_mask, const MaybeTensor& key_lengths,
    const MaybeTensor& q_offsets, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
    const MaybeTensor& rng_state, int64_t q_offset, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, at::ScalarType out_dtype, bool return_stats) {
  check_rank(scores, "scores", 4);
  check_floating(scores, "scores");
  check_axes(scores, "scores");
  check_unit_last_stride(scores, "scores");
  const int64_t batch = scores.size(0), heads = scores.size(1);
  const at::ScalarType row_dtype = accumulator(scores.scalar_type());
  check_result_dtype(out_dtype, "out_dtype", scores.scalar_type());
  if (attn_mask) {
    check_shape(*attn_mask, "attn_mask", scores.sizes());
    check_dtype(*attn_mask, "attn_mask", {at::kBool, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble});
    check_device(*attn_mask, "attn_mask", scores, "scores");
  }
  ScoreRuleParams rule =
      score_rule_params({key_lengths, q_offsets, alibi_slopes, sinks, q_offset, window_left, window_right, softcap},
                        batch, heads, row_dtype, scores, "scores");
  if (attn_mask) {
    rule.attn_mask = pointer(attn_mask);
    rule.mask_strides = strides4(*attn_mask);
    rule.mask_dtype = to_dtype(attn_mask->scalar_type());
  }

  const c10::DeviceGuard guard(scores.device());
  const at::TensorOptions weights_options = scores.options().dtype(out_dtype);
  const at::TensorOptions row_options = scores.options().dtype(row_dtype);
  const at::IntArrayRef row_shape = scores.sizes().slice(0, 3);
  at::Tensor weights = empty_aligned_rows(scores.sizes(), weights_options);
  at::Tensor dropped =
      dropout_p > 0 ? empty_aligned_rows(scores.sizes(), weights_options) : at::empty({0}, weights_options);
  at::Tensor lse = at::empty(row_shape, row_options);
  at::Tensor max_score = return_stats ? at::empty(row_shape, row_options) : at::empty({0}, row_options);
  at::Tensor entropy = return_stats ? at::empty(row_shape, row_options) : at::empty({0}, row_options);

  MaskedSoftmaxParams params;
  params.scores = scores.const_data_ptr();
  params.scores_strides = strides3(scores);
  params.weights = weights.mutable_data_ptr();
  params.dropped = dropout_p > 0 ? dropped.mutable_data_ptr() : nullptr;
  params.weights_strides = strides3(weights);
  params.lse = lse.mutable_data_ptr();
  params.max_score = return_stats ? max_score.mutable_data_ptr() : nullptr;
  params.entropy = return_stats ? entropy.mutable_data_ptr() : nullptr;
  params.batch = batch;
  params.heads = heads;
  params.seqlen_q = scores.size(2);
  params.seqlen_kv = scores.size(3);
  params.scores_dtype = to_dtype(scores.scalar_type());
  params.weights_dtype = to_dtype(out_dtype);
  params.rule = rule;
  params.dropout = dropout_params(dropout_p, rng_state, scores, "scores");

  const cudaStream_t stream = device::current_stream(scores.device());
  if (row_dtype == at::kDouble) {
    launch_masked_softmax<double>(params, stream);
  } else {
    launch_masked_softmax<float>(params, stream);
  }
  return {weights, dropped, lse, max_score, entropy};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> masked_softmax_backward(
    const MaybeTensor& grad_weights, const MaybeTensor& grad_dropped, const MaybeTensor& grad_lse,
    const at::Tensor& weights, const MaybeTensor& scores, const at::Tensor& lse, const MaybeTensor& q_offsets,
    const MaybeTensor& sinks, const MaybeTensor& rng_state, int64_t q_offset, double softcap, double dropout_p,
    at::ScalarType grad_dtype, bool bias_grad, bool sink_grad, bool slope_grad) {
  check_rank(weights, "weights", 4);
  check_floating(weights, "weights");
  check_axes(weights, "weights");
  check_unit_last_stride(weights, "weights");
  const int64_t batch = weights.size(0), heads = weights.size(1);
  const at::IntArrayRef row_shape = weights.sizes().slice(0, 3);
  const at::ScalarType row_dtype = accumulator(weights.scalar_type());
  check_result_dtype(grad_dtype, "grad_dtype", weights.scalar_type());
  if (grad_weights) check_rows(*grad_weights, "grad_weights", weights, "weights");
  if (grad_dropped) check_rows(*grad_dropped, "grad_dropped", weights, "weights");
  if (scores) check_rows(*scores, "scores", weights, "weights");
  check_operand(lse, "lse", row_shape, row_dtype, weights, "weights");
  check_operand(grad_lse, "grad_lse", row_shape, row_dtype, weights, "weights");
  check_operand(q_offsets, "q_offsets", {batch}, at::kLong, weights, "weights");
  check_operand(sinks, "sinks", {heads}, row_dtype, weights, "weights");
  check_softcap(softcap);
  TORCH_CHECK_VALUE((softcap > 0) == scores.has_value(),
                    "scores: expected a tensor exactly when softcap is not 0, got ", scores ? "a tensor" : "None",
                    " with softcap ", softcap);
  TORCH_CHECK_VALUE(dropout_p > 0 || !grad_dropped, "grad_dropped: expected None when dropout_p is 0, got a tensor");
  TORCH_CHECK_VALUE(sinks || !sink_grad, "sinks: expected a tensor when sink_grad is true, got None");

  const c10::DeviceGuard guard(weights.device());
  const at::TensorOptions grad_options = weights.options().dtype(grad_dtype);
  const at::TensorOptions row_options = weights.options().dtype(row_dtype);
  const bool separate_bias = bias_grad && softcap > 0;  // else grad_scores is the bias's gradient
  at::Tensor grad_scores = empty_aligned_rows(weights.sizes(), grad_options);
  at::Tensor grad_bias =
      separate_bias ? empty_aligned_rows(weights.sizes(), grad_options) : at::empty({0}, grad_options);
  at::Tensor grad_sink_rows = sink_grad ? at::empty(row_shape, row_options) : at::empty({0}, row_options);
  at::Tensor grad_slope_rows = slope_grad ? at::empty(row_shape, row_options) : at::empty({0}, row_options);

  MaskedSoftmaxBackwardParams params;
  const auto set_rows = [](const MaybeTensor& tensor, const void*& data, Strides3& strides, DType& dtype) {
    data = pointer(tensor);
    strides = tensor ? strides3(*tensor) : Strides3{};
    dtype = tensor ? to_dtype(tensor->scalar_type()) : DType::kFloat32;
  };
  set_rows(grad_weights, params.grad_weights, params.grad_weights_strides, params.grad_weights_dtype);
  set_rows(grad_dropped, params.grad_dropped, params.grad_dropped_strides, params.grad_dropped_dtype);
  set_rows(weights, params.weights, params.weights_strides, params.weights_dtype);
  set_rows(scores, params.scores, params.scores_strides, params.scores_dtype);
  params.grad_lse = pointer(grad_lse);
  params.lse = lse.const_data_ptr();
  params.grad_scores = grad_scores.mutable_data_ptr();
  params.grad_bias = separate_bias ? grad_bias.mutable_data_ptr() : nullptr;
  params.grad_scores_strides = strides3(grad_scores);
  params.grad_dtype = to_dtype(grad_dtype);
  params.grad_sink_rows = sink_grad ? grad_sink_rows.mutable_data_ptr() : nullptr;
  params.grad_slope_rows = slope_grad ? grad_slope_rows.mutable_data_ptr() : nullptr;
  params.batch = batch;
  params.heads = heads;
  params.seqlen_q = weights.size(2);
  params.seqlen_kv = weights.size(3);
  params.rule = ScoreRuleParams{};
  params.rule.window_left = params.rule.window_right = -1;
  params.rule.sinks = pointer(sinks);
  params.rule.q_offset = q_offset;
  params.rule.q_offsets = int64_pointer(q_offsets);
  params.rule.softcap = softcap;
  params.dropout = dropout_params(dropout_p, rng_state, weights, "weights");

  const cudaStream_t stream = device::current_stream(weights.device());
  if (row_dtype == at::kDouble) {
    launch_masked_softmax_backward<double>(params, stream);
  } else {
    launch_masked_softmax_backward<float>(params, stream);
  }
  return {grad_scores, grad_bias, grad_sink_rows, grad_slope_rows};
}

namespace {

torch::Library register_parts() {
  torch::Library library(torch::Library::IMPL, "mha_ext", device::dispatch_key(), __FILE__, __LINE__);
  library.impl("qkv_split", &qkv_split);
  library.impl("qkv_merge", &qkv_merge);
  library.impl("matmul", &matmul);
  library.impl("masked_softmax", &masked_softmax);
  library.impl("masked_softmax_backward", &masked_softmax_backward);
  library.impl("attention_forward", &attention_forward);
  library.impl("attention_backward", &attention_backward);
  return library;
}

const torch::Library library = register_parts();

}  // namespace
}  // namespace mha_ext
