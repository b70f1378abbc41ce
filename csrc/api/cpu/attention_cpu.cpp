#include "api/cpu/attention_cpu.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <limits>

#include "api/checks.h"
#include "api/cpu/threads.h"
#include "api/score_rule.h"
#include "cpu/attention.h"
#include "cpu/work_plan.h"

namespace mha_ext {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// Splits of the keys of each tile, so that every thread has work; and the memory for what they leave. They follow from
// the sizes alone, so that the bits do not depend on the number of threads.
at::Tensor plan_splits(cpu::WorkPlan& plan, const AttentionParams& params) {
  if (plan.tiles >= cpu::kWantedUnits || params.seqlen_kv < 2 * cpu::kSplitKeys) return {};
  plan.splits =
      static_cast<int>(std::min((cpu::kWantedUnits + plan.tiles - 1) / plan.tiles, params.seqlen_kv / cpu::kSplitKeys));
  plan.partial_stride = cpu::kPartialHead + params.head_dim_v;
  at::Tensor partial = at::detail::empty_cpu({plan.units() * plan.max_rows * plan.partial_stride}, at::kFloat);
  plan.partial = partial.mutable_data_ptr<float>();
  return partial;
}

// Values in the form that the kernels want, where many tiles of a head read them; and the memory for it.
at::Tensor pack_values(const cpu::Kernels& kernels, cpu::WorkPlan& plan, const AttentionParams& params, int threads) {
  const int64_t size = kernels.packed_values_size ? kernels.packed_values_size(params) : 0;
  if (size == 0) return {};
  at::Tensor packed = at::detail::empty_cpu({size}, at::kFloat);
  auto* to = packed.mutable_data_ptr<float>();
  plan.packed_values = to;
  share_out(params.batch * params.num_heads_kv, threads,
            [&](int64_t head, int64_t) { kernels.pack_values(params, to, head); });
  return packed;
}

}  // namespace

void check_attention_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const MaybeTensor& attn_mask, const MaybeTensor& cu_seqlens_q,
                             const MaybeTensor& cu_seqlens_k) {
  check_rank(query, "query", 4);
  check_dtype(query, "query", {at::kHalf, at::kBFloat16, at::kFloat});
  check_rank(key, "key", 4);
  check_rank(value, "value", 4);
  const int64_t batch = query.size(0), heads = query.size(1), heads_kv = key.size(1);
  check_shape(key, "key", {batch, heads_kv, key.size(2), query.size(3)});
  check_shape(value, "value", {batch, heads_kv, key.size(2), value.size(3)});
  TORCH_CHECK_VALUE(heads == heads_kv || (heads_kv > 0 && heads % heads_kv == 0),
                    "key: expected a number of heads that divides query's ", heads, ", got ", heads_kv);
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    check_dtype(tensor, name, {query.scalar_type()});
    check_device(tensor, name, query, "query");
    check_axes(tensor, name);
    check_unit_last_stride(tensor, name);
    TORCH_CHECK_VALUE(tensor.size(3) >= 1 && tensor.size(3) <= kMaxCpuHeadDim, name,
                      ": expected a head dimension from 1 to ", kMaxCpuHeadDim, ", got ", tensor.size(3));
  };
  check(query, "query");
  check(key, "key");
  check(value, "value");
  TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                    "cu_seqlens_q, cu_seqlens_k: expected both or neither, got one");
  if (cu_seqlens_q) {
    check_rank(*cu_seqlens_q, "cu_seqlens_q", 1);
    TORCH_CHECK_VALUE(cu_seqlens_q->size(0) > 0, "cu_seqlens_q: expected at least one element, got none");
    check_operand(cu_seqlens_q, "cu_seqlens_q", cu_seqlens_q->sizes(), at::kInt, query, "query");
    check_operand(cu_seqlens_k, "cu_seqlens_k", cu_seqlens_q->sizes(), at::kInt, query, "query");
    TORCH_CHECK_VALUE(batch == 1, "query: expected a batch of 1 (packed), got shape ", query.sizes());
    TORCH_CHECK_VALUE(!attn_mask, "attn_mask: expected None with cu_seqlens_q, got a tensor");
  }
  if (attn_mask) {
    check_rank(*attn_mask, "attn_mask", 4);
    const int64_t shape[] = {batch, heads, query.size(2), key.size(2)};
    for (int64_t axis = 0; axis < 4; ++axis) {
      TORCH_CHECK_VALUE(attn_mask->size(axis) == 1 || attn_mask->size(axis) == shape[axis],
                        "attn_mask: expected a shape that broadcasts to ", at::IntArrayRef(shape), ", got ",
                        attn_mask->sizes());
    }
    check_dtype(*attn_mask, "attn_mask", {at::kBool, at::kHalf, at::kBFloat16, at::kFloat});
    check_device(*attn_mask, "attn_mask", query, "query");
  }
}

at::Tensor empty_like_layout(const at::Tensor& model, int64_t cols) {
  const int64_t batch = model.size(0), heads = model.size(1), rows = model.size(2);
  if (model.stride(1) >= model.stride(2)) return at::detail::empty_cpu({batch, heads, rows, cols}, model.scalar_type());
  const int64_t strides[] = {rows * heads * cols, cols, heads * cols, 1};
  return at::detail::empty_strided_cpu({batch, heads, rows, cols}, strides, model.scalar_type());
}

AttentionParams attention_params(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& output, double scale) {
  AttentionParams params = {};
  params.query = query.const_data_ptr();
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.output = output.mutable_data_ptr();
  params.query_strides = strides3(query);
  params.key_strides = strides3(key);
  params.value_strides = strides3(value);
  params.output_strides = strides3(output);
  params.batch = query.size(0);
  params.seqlen_q = query.size(2);
  params.seqlen_kv = key.size(2);
  params.num_heads_q = static_cast<int>(query.size(1));
  params.num_heads_kv = static_cast<int>(key.size(1));
  params.head_dim = static_cast<int>(query.size(3));
  params.head_dim_v = static_cast<int>(value.size(3));
  params.scale = static_cast<float>(scale);
  params.dtype = to_dtype(query.scalar_type());
  return params;
}

double flops_of(const AttentionParams& params) {
  const int64_t rows = (params.cu_seqlens_q ? 1 : params.batch) * params.num_heads_q * params.seqlen_q;
  return 2. * static_cast<double>(rows) * static_cast<double>(params.seqlen_kv * (params.head_dim + params.head_dim_v));
}

void compute_attention(const AttentionParams& params) {
  const cpu::Kernels& kernels = cpu::kernels();
  cpu::WorkPlan plan = cpu::plan_tiles(params);
  if (plan.tiles == 0) return;
  const int threads = threads_for(flops_of(params));
  const at::Tensor partial = plan_splits(plan, params);
  const at::Tensor packed = pack_values(kernels, plan, params, threads);
  share_out(plan.units(), threads, [&](int64_t unit, int64_t) { kernels.run_unit(params, plan, unit); });
  if (plan.splits == 1) return;
  share_out(plan.tiles, threads, [&](int64_t tile, int64_t) { kernels.merge_splits(params, plan, tile); });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& attn_mask,
    const MaybeTensor& key_lengths, const MaybeTensor& q_offsets, const MaybeTensor& alibi_slopes,
    const MaybeTensor& sinks, const MaybeTensor& rng_state, const MaybeTensor& cu_seqlens_q,
    const MaybeTensor& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, double scale, bool, bool for_backward, bool return_stats) {
  check_attention_tensors(query, key, value, attn_mask, cu_seqlens_q, cu_seqlens_k);
  const int64_t heads = query.size(1), seqlen_q = query.size(2);
  const bool packed = cu_seqlens_q.has_value();

  const auto rows_if = [&](bool wanted) -> at::Tensor {
    return wanted ? at::detail::empty_cpu({query.size(0), heads, seqlen_q}, at::kFloat)
                  : at::detail::empty_cpu({0}, at::kFloat);
  };
  at::Tensor output = empty_like_layout(query, value.size(3));
  at::Tensor lse = rows_if(true), max_score = rows_if(return_stats), entropy = rows_if(return_stats);
  at::Tensor row_stats = for_backward ? at::detail::empty_cpu({query.size(0), heads, seqlen_q, 2}, at::kFloat)
                                      : at::detail::empty_cpu({0}, at::kFloat);
  if (packed) {  // rows that no sequence owns see nothing
    output.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    if (return_stats) max_score.fill_(-std::numeric_limits<float>::infinity());
    if (return_stats) entropy.zero_();
  }

  AttentionParams params = attention_params(query, key, value, output, scale);
  if (packed) {
    params.batch = cu_seqlens_q->size(0) - 1;
    params.cu_seqlens_q = cu_seqlens_q->const_data_ptr<int32_t>();
    params.cu_seqlens_k = cu_seqlens_k->const_data_ptr<int32_t>();
  }
  params.rule =
      score_rule_params({key_lengths, q_offsets, alibi_slopes, sinks, q_offset, window_left, window_right, softcap},
                        params.batch, heads, at::kFloat, query, "query");
  params.dropout = dropout_params(dropout_p, rng_state, query, "query");
  if (query.numel() == 0 || params.batch == 0) return {output, lse, row_stats, max_score, entropy};

  params.lse = lse.mutable_data_ptr<float>();
  if (for_backward) params.row_stats = row_stats.mutable_data_ptr<float>();
  if (return_stats) {
    params.max_score = max_score.mutable_data_ptr<float>();
    params.entropy = entropy.mutable_data_ptr<float>();
  }
  params.row_batch_stride = packed ? 0 : lse.stride(0);
  params.row_head_stride = lse.stride(1);
  if (attn_mask) {
    params.rule.attn_mask = attn_mask->const_data_ptr();
    params.rule.mask_strides = strides4(*attn_mask);  // 0 on axes that it repeats
    params.rule.mask_dtype = to_dtype(attn_mask->scalar_type());
  }

  compute_attention(params);
  return {output, lse, row_stats, max_score, entropy};
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("attention_forward_cpu", &attention_forward_cpu); }

}  // namespace mha_ext
