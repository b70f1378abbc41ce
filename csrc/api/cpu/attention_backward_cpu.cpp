#include "api/cpu/attention_backward_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "api/checks.h"
#include "api/cpu/attention_cpu.h"
#include "api/cpu/threads.h"
#include "api/score_rule.h"
#include "cpu/attention.h"
#include "cpu/backward_plan.h"

namespace mha_ext {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// One gradient of the packed projection, or three.
struct InputGradients {
  at::Tensor packed, query, key, value;

  InputGradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_packed) {
    if (is_packed) {
      const int64_t heads = q.size(1), heads_kv = k.size(1), all = heads + 2 * heads_kv;
      packed = at::empty({q.size(0), q.size(2), all * q.size(3)}, q.options());
      const at::Tensor by_heads = packed.view({q.size(0), q.size(2), all, q.size(3)}).transpose(1, 2);
      query = by_heads.narrow(1, 0, heads);
      key = by_heads.narrow(1, heads, heads_kv);
      value = by_heads.narrow(1, heads + heads_kv, heads_kv);
    } else {
      query = empty_like_layout(q, q.size(3));
      key = empty_like_layout(k, k.size(3));
      value = empty_like_layout(v, v.size(3));
    }
  }
};

// (parts, batch, heads, rows, cols) fp32 -> the shape and dtype of the mask. Sums in an order of their own, so that
// they do not depend on the number of threads.
at::Tensor finish_bias(const at::Tensor& parts, const at::Tensor& mask) {
  const int64_t count = parts.size(0), cols = parts.size(4), rows = parts.numel() / std::max<int64_t>(count * cols, 1);
  if (count == 1 && mask.size(3) == cols) return parts.view(mask.sizes()).to(mask.scalar_type());
  at::Tensor sum = at::empty(mask.sizes(), parts.options());
  const float* from = parts.const_data_ptr<float>();
  float* to = sum.mutable_data_ptr<float>();
  if (mask.size(3) == cols) {
    at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
      std::copy(from + begin * cols, from + end * cols, to + begin * cols);
      for (int64_t part = 1; part < count; ++part) {
        const float* more = from + part * rows * cols;
        for (int64_t i = begin * cols; i < end * cols; ++i) to[i] += more[i];
      }
    });
    return sum.to(mask.scalar_type());
  }
  for (int64_t row = 0; row < sum.numel(); ++row) {  // the mask repeats its last axis
    double total = 0;
    for (int64_t part = 0; part < count; ++part) {
      for (int64_t j = 0; j < cols; ++j) total += from[(part * rows + row) * cols + j];
    }
    to[row] = static_cast<float>(total);
  }
  return sum.to(mask.scalar_type());
}

// (batch, heads, count) -> (batch, heads), or (heads)
at::Tensor sum_of(const at::Tensor& rows, bool over_batch) {
  const int64_t batch = rows.size(0), heads = rows.size(1), count = rows.size(2);
  at::Tensor sum = over_batch ? at::empty({heads}, rows.options()) : at::empty({batch, heads}, rows.options());
  const float* from = rows.const_data_ptr<float>();
  float* to = sum.mutable_data_ptr<float>();
  for (int64_t i = 0; i < sum.numel(); ++i) {
    double total = 0;
    for (int64_t b = 0; b < (over_batch ? batch : 1); ++b) {
      for (int64_t j = 0; j < count; ++j) total += from[(b * heads + i) * count + j];
    }
    to[i] = static_cast<float>(total);
  }
  return sum;
}

void run_backward(const AttentionBackwardParams& params, cpu::BackwardPlan& plan) {
  const AttentionParams& forward = params.forward;
  const int64_t rows = (forward.cu_seqlens_q ? 1 : forward.batch) * forward.num_heads_q * forward.seqlen_q;
  const double flops =
      5. * static_cast<double>(rows) * static_cast<double>(forward.seqlen_kv * (forward.head_dim + forward.head_dim_v));
  const int threads = threads_for(flops);
  const int64_t part_floats = plan.runs > 1 ? plan.runs * rows * forward.head_dim : 0;
  const int64_t own_floats = plan.accumulator_floats * std::min<int64_t>(threads, plan.items());
  at::Tensor workspace;
  if (part_floats + own_floats > 0) workspace = at::empty({part_floats + own_floats}, at::kFloat);
  float* memory = workspace.defined() ? workspace.mutable_data_ptr<float>() : nullptr;
  plan.query_parts = memory;
  const cpu::Kernels& kernels = cpu::kernels();
  share_out(plan.items(), threads, [&](int64_t item, int64_t slot) {
    float* own = plan.accumulator_floats ? memory + part_floats + slot * plan.accumulator_floats : nullptr;
    kernels.run_backward_item(params, plan, item, own);
  });
  if (plan.runs == 1) return;
  share_out(plan.queries.tiles, threads, [&](int64_t tile, int64_t) { kernels.add_query_parts(params, plan, tile); });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward_cpu(
    const at::Tensor& grad_output, const MaybeTensor& grad_lse, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& lse, const at::Tensor& row_stats,
    const MaybeTensor& attn_mask, const MaybeTensor& key_lengths, const MaybeTensor& q_offsets,
    const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, const MaybeTensor& rng_state,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, int64_t q_offset, int64_t window_left,
    int64_t window_right, double softcap, double dropout_p, double scale, bool, bool packed, bool mask_grad,
    bool slopes_grad, bool sinks_grad) {
  check_attention_tensors(query, key, value, attn_mask, cu_seqlens_q, cu_seqlens_k);
  const int64_t batch = query.size(0), heads = query.size(1), seqlen_q = query.size(2), seqlen_kv = key.size(2);
  const auto check_output = [&](const at::Tensor& tensor, const char* name) {
    check_shape(tensor, name, {batch, heads, seqlen_q, value.size(3)});
    check_dtype(tensor, name, {query.scalar_type()});
    check_device(tensor, name, query, "query");
    check_unit_last_stride(tensor, name);
  };
  check_output(grad_output, "grad_output");
  check_output(output, "output");
  check_operand(lse, "lse", {batch, heads, seqlen_q}, at::kFloat, query, "query");
  check_operand(grad_lse, "grad_lse", {batch, heads, seqlen_q}, at::kFloat, query, "query");
  check_operand(row_stats, "row_stats", {batch, heads, seqlen_q, 2}, at::kFloat, query, "query");
  TORCH_CHECK_VALUE(!mask_grad || (attn_mask && attn_mask->scalar_type() != at::kBool),
                    "attn_mask: expected a floating tensor when mask_grad is true, got ",
                    attn_mask ? "a bool one" : "None");
  TORCH_CHECK_VALUE(!slopes_grad || alibi_slopes, "alibi_slopes: expected a tensor when slopes_grad is true, got None");
  TORCH_CHECK_VALUE(!sinks_grad || sinks, "sinks: expected a tensor when sinks_grad is true, got None");
  TORCH_CHECK_VALUE(!packed || (seqlen_q == seqlen_kv && query.size(3) == value.size(3)),
                    "packed: expected query, key and value of one length and head dimension, got shapes ",
                    query.sizes(), ", ", key.sizes(), " and ", value.sizes());

  AttentionBackwardParams params = {};
  params.forward = attention_params(query, key, value, output, scale);
  AttentionParams& forward = params.forward;
  if (cu_seqlens_q) {
    forward.batch = cu_seqlens_q->size(0) - 1;
    forward.cu_seqlens_q = cu_seqlens_q->const_data_ptr<int32_t>();
    forward.cu_seqlens_k = cu_seqlens_k->const_data_ptr<int32_t>();
  }
  forward.rule =
      score_rule_params({key_lengths, q_offsets, alibi_slopes, sinks, q_offset, window_left, window_right, softcap},
                        forward.batch, heads, at::kFloat, query, "query");
  forward.dropout = dropout_params(dropout_p, rng_state, query, "query");
  if (attn_mask) {
    forward.rule.attn_mask = attn_mask->const_data_ptr();
    forward.rule.mask_strides = strides4(*attn_mask);  // 0 on axes that it repeats
    forward.rule.mask_dtype = to_dtype(attn_mask->scalar_type());
  }
  forward.row_stats = static_cast<float*>(row_stats.mutable_data_ptr());
  forward.row_batch_stride = cu_seqlens_q ? 0 : lse.stride(0);
  forward.row_head_stride = lse.stride(1);

  InputGradients gradients(query, key, value, packed);
  params.grad_output = grad_output.const_data_ptr();
  params.grad_output_strides = strides3(grad_output);
  params.grad_lse = static_cast<const float*>(pointer(grad_lse));
  params.grad_query = gradients.query.mutable_data_ptr();
  params.grad_key = gradients.key.mutable_data_ptr();
  params.grad_value = gradients.value.mutable_data_ptr();
  params.grad_query_strides = strides3(gradients.query);
  params.grad_key_strides = strides3(gradients.key);
  params.grad_value_strides = strides3(gradients.value);

  const at::TensorOptions row_options = query.options().dtype(at::kFloat);
  at::Tensor bias_parts, slope_parts, sink_rows;
  const bool empty = query.numel() == 0 || forward.batch == 0;
  if (mask_grad) {
    params.bias_batch = attn_mask->size(0);
    params.bias_heads = attn_mask->size(1);
    params.bias_rows = attn_mask->size(2);
  }
  if (cu_seqlens_q || empty) {  // rows that no sequence owns
    for (at::Tensor* each : {&gradients.query, &gradients.key, &gradients.value}) each->zero_();
  }
  cpu::BackwardPlan plan;
  if (!empty) plan = cpu::plan_backward(params);
  if (mask_grad) {
    bias_parts =
        at::zeros({plan.bias_parts, params.bias_batch, params.bias_heads, params.bias_rows, seqlen_kv}, row_options);
    params.grad_bias = bias_parts.mutable_data_ptr<float>();
  }
  if (slopes_grad) {
    slope_parts = at::zeros({forward.batch, heads, plan.runs}, row_options);
    params.grad_slopes = slope_parts.mutable_data_ptr<float>();
    params.slope_partials = plan.runs;
  }
  if (sinks_grad) {
    sink_rows = at::zeros(lse.sizes(), row_options);
    params.grad_sink_rows = sink_rows.mutable_data_ptr<float>();
  }
  if (!empty) run_backward(params, plan);

  return {packed ? gradients.packed : gradients.query,
          packed ? at::empty({0}, query.options()) : gradients.key,
          packed ? at::empty({0}, query.options()) : gradients.value,
          mask_grad ? finish_bias(bias_parts, *attn_mask) : at::empty({0}, row_options),
          slopes_grad ? sum_of(slope_parts, false) : at::empty({0}, row_options),
          sinks_grad ? sum_of(sink_rows, true) : at::empty({0}, row_options)};
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("attention_backward_cpu", &attention_backward_cpu); }

}  // namespace mha_ext
