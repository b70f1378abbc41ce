#include "api/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "api/aligned_rows.h"
#include "api/checks.h"
#include "api/device.h"
#include "api/score_rule.h"
#include "kernels/attention.h"

namespace mha_ext {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// What both directions are given, as their schemas list it.
struct Operands {
  const at::Tensor &query, &key, &value;
  const MaybeTensor &attn_mask, &rng_state, &cu_seqlens_q, &cu_seqlens_k;
  ScoreRuleOperands rule;
  double dropout_p, scale;
  bool allow_tf32;
};

void check_cu_seqlens(const Operands& x) {
  TORCH_CHECK_VALUE(x.cu_seqlens_q.has_value() == x.cu_seqlens_k.has_value(),
                    "cu_seqlens_q, cu_seqlens_k: expected both or neither, got one");
  if (!x.cu_seqlens_q) return;
  check_rank(*x.cu_seqlens_q, "cu_seqlens_q", 1);
  TORCH_CHECK_VALUE(x.cu_seqlens_q->size(0) > 0, "cu_seqlens_q: expected at least one element, got none");
  check_operand(x.cu_seqlens_q, "cu_seqlens_q", x.cu_seqlens_q->sizes(), at::kInt, x.query, "query");
  check_operand(x.cu_seqlens_k, "cu_seqlens_k", x.cu_seqlens_q->sizes(), at::kInt, x.query, "query");
  TORCH_CHECK_VALUE(x.query.size(0) == 1, "query: expected a batch of 1 (packed), got shape ", x.query.sizes());
  TORCH_CHECK_VALUE(!x.attn_mask, "attn_mask: expected None with cu_seqlens_q, got a tensor");
}

void check_tensors(const Operands& x) {
  check_rank(x.query, "query", 4);
  check_dtype(x.query, "query", {at::kHalf, at::kBFloat16, at::kFloat});
  check_rank(x.key, "key", 4);
  check_rank(x.value, "value", 4);
  const int64_t batch = x.query.size(0), heads = x.query.size(1), heads_kv = x.key.size(1);
  check_shape(x.key, "key", {batch, heads_kv, x.key.size(2), x.query.size(3)});
  check_shape(x.value, "value", {batch, heads_kv, x.key.size(2), x.value.size(3)});
  TORCH_CHECK_VALUE(heads == heads_kv || (heads_kv > 0 && heads % heads_kv == 0),
                    "key: expected a number of heads that divides query's ", heads, ", got ", heads_kv);
  TORCH_CHECK_VALUE(batch * heads <= std::numeric_limits<int32_t>::max(),
                    "query: expected less than 2^31 heads in all, got shape ", x.query.sizes());
  const auto check_like_query = [&](const at::Tensor& tensor, const char* name) {
    check_dtype(tensor, name, {x.query.scalar_type()});
    check_device(tensor, name, x.query, "query");
  };
  check_like_query(x.key, "key");
  check_like_query(x.value, "value");
  const auto check_memory = [&](const at::Tensor& tensor, const char* name) {
    check_axes(tensor, name);
    check_unit_last_stride(tensor, name);
    TORCH_CHECK_VALUE(tensor.size(3) >= 1 && tensor.size(3) <= kMaxFusedHeadDim, name,
                      ": expected a head dimension from 1 to ", kMaxFusedHeadDim, ", got ", tensor.size(3));
  };
  check_memory(x.query, "query");
  check_memory(x.key, "key");
  check_memory(x.value, "value");
  check_cu_seqlens(x);
  if (x.attn_mask) {
    check_rank(*x.attn_mask, "attn_mask", 4);
    const int64_t shape[] = {batch, heads, x.query.size(2), x.key.size(2)};
    for (int64_t axis = 0; axis < 4; ++axis) {
      TORCH_CHECK_VALUE(x.attn_mask->size(axis) == 1 || x.attn_mask->size(axis) == shape[axis],
                        "attn_mask: expected a shape that broadcasts to ", at::IntArrayRef(shape), ", got ",
                        x.attn_mask->sizes());
    }
    check_dtype(*x.attn_mask, "attn_mask", {at::kBool, at::kHalf, at::kBFloat16, at::kFloat});
    check_device(*x.attn_mask, "attn_mask", x.query, "query");
  }
}

bool repeats(const at::Tensor& mask, int64_t axis) { return mask.size(axis) == 1 || mask.stride(axis) == 0; }

// A float mask in the form that kernels read: neighbours along a row, pairs aligned, of query's dtype or fp32. Copied
// where it has another, in its own shape: axes that it repeats stay repeated.
at::Tensor bias_operand(const at::Tensor& mask, at::ScalarType query_dtype) {
  const bool readable = mask.scalar_type() == query_dtype || mask.scalar_type() == at::kFloat;
  const at::ScalarType dtype = readable ? mask.scalar_type() : at::kFloat;
  if (readable && stride_of(mask, 3) == (mask.size(3) > 1 ? 1 : 0) && rows_align(mask, 2 * mask.element_size())) {
    return mask;
  }
  at::Tensor own = mask;
  for (int64_t axis = 0; axis < 3; ++axis) {
    if (repeats(mask, axis) && mask.size(axis) > 1) own = own.narrow(axis, 0, 1);
  }
  return empty_aligned_rows(own.sizes(), own.options().dtype(dtype)).copy_(own).expand(mask.sizes());
}

// No query of any sequence: kernels are not asked, and the gradients are zeros.
bool is_empty(const Operands& x) { return x.query.numel() == 0 || (x.cu_seqlens_q && x.cu_seqlens_q->size(0) == 1); }

// The tensors behind MaskBlocks.
struct MaskBlocksStorage {
  at::Tensor bits, map, key_bits;
};

MaskBlocksStorage fill_mask_blocks(MaskBlocks& blocks, const at::Tensor& mask, int64_t heads_kv, cudaStream_t stream) {
  MaskBlocksStorage storage;
  const bool is_bool = mask.scalar_type() == at::kBool, repeats_rows = repeats(mask, 2);
  if (mask.numel() == 0 || (!is_bool && !repeats_rows)) return storage;
  const auto own_size = [&](int64_t axis) { return repeats(mask, axis) ? int64_t{1} : mask.size(axis); };
  const int64_t key_blocks = (mask.size(3) + kMaskBlock - 1) / kMaskBlock;
  const int64_t batch = own_size(0), heads = own_size(1), rows = own_size(2);
  MaskBlocksParams params = {};
  params.attn_mask = mask.const_data_ptr();
  params.mask_strides = strides4(mask);
  params.mask_dtype = to_dtype(mask.scalar_type());
  params.mask_batch = batch;
  params.mask_heads = heads;
  params.mask_rows = rows;
  params.seqlen_kv = mask.size(3);
  params.group = static_cast<int>(mask.size(1) / heads_kv);

  const auto word = [](at::Tensor& tensor) { return static_cast<uint64_t*>(tensor.mutable_data_ptr()); };
  const auto own_strides = [](const at::Tensor& tensor) { return strides3(tensor); };  // 0 on axes of one element
  if (is_bool) {
    storage.bits = at::empty({batch, heads, rows, key_blocks}, mask.options().dtype(at::kLong));
    const int64_t row_blocks = (rows + kMaskBlock - 1) / kMaskBlock;
    storage.map = at::empty({batch, heads, row_blocks, key_blocks}, mask.options().dtype(at::kByte));
    blocks.bits = params.bits = word(storage.bits);
    blocks.bits_strides = own_strides(storage.bits);
    blocks.map = params.map = static_cast<BlockVisibility*>(storage.map.mutable_data_ptr());
    blocks.map_strides = own_strides(storage.map);
    if (repeats_rows) blocks.bits_strides.row = blocks.map_strides.row = 0;
  }
  if (repeats_rows) {
    storage.key_bits = at::empty({batch, heads > 1 ? heads_kv : 1, key_blocks}, mask.options().dtype(at::kLong));
    blocks.key_bits = params.key_bits = word(storage.key_bits);
    blocks.key_bits_batch_stride = stride_of(storage.key_bits, 0);
    blocks.key_bits_head_stride = stride_of(storage.key_bits, 1);
  }
  mask_blocks(params, stream);
  return storage;
}

// Copies that kernels read in place of the operands, alive until the launch.
struct Prepared {
  at::Tensor query, key, value, mask;
  MaskBlocksStorage mask_blocks;
};

Prepared prepare(AttentionParams& params, const Operands& x, cudaStream_t stream) {
  Prepared own;
  own.query = aligned_rows(x.query);
  own.key = aligned_rows(x.key);
  own.value = aligned_rows(x.value);
  const bool packed = x.cu_seqlens_q.has_value();
  const int64_t heads = x.query.size(1);
  params = {};
  params.batch = packed ? x.cu_seqlens_q->size(0) - 1 : x.query.size(0);
  params.rule = score_rule_params(x.rule, params.batch, heads, at::kFloat, x.query, "query");
  params.dropout = dropout_params(x.dropout_p, x.rng_state, x.query, "query");
  params.query = own.query.const_data_ptr();
  params.key = own.key.const_data_ptr();
  params.value = own.value.const_data_ptr();
  params.query_strides = strides3(own.query);
  params.key_strides = strides3(own.key);
  params.value_strides = strides3(own.value);
  if (packed) {
    params.cu_seqlens_q = x.cu_seqlens_q->const_data_ptr<int32_t>();
    params.cu_seqlens_k = x.cu_seqlens_k->const_data_ptr<int32_t>();
  }
  params.seqlen_q = x.query.size(2);
  params.seqlen_kv = x.key.size(2);
  params.num_heads_q = static_cast<int>(heads);
  params.num_heads_kv = static_cast<int>(x.key.size(1));
  params.head_dim = static_cast<int>(x.query.size(3));
  params.head_dim_v = static_cast<int>(x.value.size(3));
  params.scale = static_cast<float>(x.scale);
  params.allow_tf32 = x.allow_tf32;
  params.dtype = to_dtype(x.query.scalar_type());
  if (x.attn_mask) {
    own.mask = x.attn_mask->expand({x.query.size(0), heads, params.seqlen_q, params.seqlen_kv});
    if (own.mask.scalar_type() != at::kBool) own.mask = bias_operand(own.mask, x.query.scalar_type());
    params.rule.attn_mask = own.mask.const_data_ptr();
    params.rule.mask_strides = strides4(own.mask);
    params.rule.mask_dtype = to_dtype(own.mask.scalar_type());
    own.mask_blocks = fill_mask_blocks(params.mask_blocks, own.mask, x.key.size(1), stream);
  }
  return own;
}

void set_rows(AttentionParams& params, const at::Tensor& lse) {
  params.row_batch_stride = params.cu_seqlens_q ? 0 : lse.stride(0);
  params.row_head_stride = lse.stride(1);
}

// (batch, heads, rows, cols) in memory as its model lies there: rows outside of heads, or heads outside of rows.
at::Tensor empty_like_layout(const at::Tensor& model, int64_t cols) {
  const int64_t batch = model.size(0), heads = model.size(1), rows = model.size(2);
  if (model.stride(1) < model.stride(2)) return at::empty({batch, rows, heads, cols}, model.options()).transpose(1, 2);
  return at::empty({batch, heads, rows, cols}, model.options());
}

template <typename T>
T* data(at::Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& attn_mask,
    const MaybeTensor& key_lengths, const MaybeTensor& q_offsets, const MaybeTensor& alibi_slopes,
    const MaybeTensor& sinks, const MaybeTensor& rng_state, const MaybeTensor& cu_seqlens_q,
    const MaybeTensor& cu_seqlens_k, int64_t q_offset, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, double scale, bool allow_tf32, bool for_backward, bool return_stats) {
  const Operands operands = {
      query,        key,
      value,        attn_mask,
      rng_state,    cu_seqlens_q,
      cu_seqlens_k, {key_lengths, q_offsets, alibi_slopes, sinks, q_offset, window_left, window_right, softcap},
      dropout_p,    scale,
      allow_tf32};
  check_tensors(operands);

  const c10::DeviceGuard guard(query.device());
  const cudaStream_t stream = device::current_stream(query.device());
  const at::TensorOptions row_options = query.options().dtype(at::kFloat);
  const int64_t batch = query.size(0), heads = query.size(1), seqlen_q = query.size(2);
  const auto rows_if = [&](bool wanted) {
    return wanted ? at::empty({batch, heads, seqlen_q}, row_options) : at::empty({0}, row_options);
  };
  at::Tensor output = empty_like_layout(query, value.size(3));
  at::Tensor lse = rows_if(true), max_score = rows_if(return_stats), entropy = rows_if(return_stats);
  at::Tensor row_stats =
      for_backward ? at::empty({batch, heads, seqlen_q, 2}, row_options) : at::empty({0}, row_options);

  if (cu_seqlens_q) {  // rows that no sequence owns see nothing
    output.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
    if (return_stats) max_score.fill_(-std::numeric_limits<float>::infinity());
    if (return_stats) entropy.zero_();
  }
  if (is_empty(operands)) return {output, lse, row_stats, max_score, entropy};

  AttentionParams params;
  const Prepared own = prepare(params, operands, stream);
  params.output = output.mutable_data_ptr();
  params.output_strides = strides3(output);
  params.lse = data<float>(lse);
  params.row_stats = data<float>(row_stats);
  params.max_score = data<float>(max_score);
  params.entropy = data<float>(entropy);
  set_rows(params, lse);
  attention_forward(params, stream);
  return {output, lse, row_stats, max_score, entropy};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const MaybeTensor& grad_lse, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& output, const at::Tensor& lse, const at::Tensor& row_stats,
    const MaybeTensor& attn_mask, const MaybeTensor& key_lengths, const MaybeTensor& q_offsets,
    const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, const MaybeTensor& rng_state,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, int64_t q_offset, int64_t window_left,
    int64_t window_right, double softcap, double dropout_p, double scale, bool allow_tf32, bool packed, bool mask_grad,
    bool slopes_grad, bool sinks_grad) {
  const Operands operands = {
      query,        key,
      value,        attn_mask,
      rng_state,    cu_seqlens_q,
      cu_seqlens_k, {key_lengths, q_offsets, alibi_slopes, sinks, q_offset, window_left, window_right, softcap},
      dropout_p,    scale,
      allow_tf32};
  check_tensors(operands);
  const int64_t batch = query.size(0), heads = query.size(1), heads_kv = key.size(1);
  const int64_t seqlen_q = query.size(2), seqlen_kv = key.size(2), head_dim = query.size(3);
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
  TORCH_CHECK_VALUE(!packed || (seqlen_q == seqlen_kv && head_dim == value.size(3)),
                    "packed: expected query, key and value of one length and head dimension, got shapes ",
                    query.sizes(), ", ", key.sizes(), " and ", value.sizes());

  const c10::DeviceGuard guard(query.device());
  const cudaStream_t stream = device::current_stream(query.device());
  const at::TensorOptions row_options = query.options().dtype(at::kFloat);
  // One gradient of the packed projection, or three.
  at::Tensor grad_packed, grad_query, grad_key, grad_value;
  if (packed) {
    grad_packed = at::empty({batch, seqlen_q, (heads + 2 * heads_kv) * head_dim}, query.options());
    const at::Tensor by_heads = grad_packed.view({batch, seqlen_q, heads + 2 * heads_kv, head_dim}).transpose(1, 2);
    grad_query = by_heads.narrow(1, 0, heads);
    grad_key = by_heads.narrow(1, heads, heads_kv);
    grad_value = by_heads.narrow(1, heads + heads_kv, heads_kv);
  } else {
    grad_query = empty_like_layout(query, head_dim);
    grad_key = empty_like_layout(key, head_dim);
    grad_value = empty_like_layout(value, value.size(3));
  }

  if (cu_seqlens_q || is_empty(operands)) {  // rows that no sequence owns, and keys that no query sees
    for (at::Tensor* grad : {&grad_query, &grad_key, &grad_value}) grad->zero_();
  }
  if (is_empty(operands)) {
    const auto zeros_if = [&](bool wanted, const MaybeTensor& like) {
      return wanted ? at::zeros(like->sizes(), like->options()) : at::empty({0}, row_options);
    };
    return {packed ? grad_packed : grad_query,
            packed ? at::empty({0}, query.options()) : grad_key,
            packed ? at::empty({0}, query.options()) : grad_value,
            zeros_if(mask_grad, attn_mask),
            zeros_if(slopes_grad, alibi_slopes),
            zeros_if(sinks_grad, sinks)};
  }

  AttentionBackwardParams params = {};
  const Prepared own = prepare(params.forward, operands, stream);
  const at::Tensor aligned_grad_output = aligned_rows(grad_output);
  at::Tensor delta = at::empty(lse.sizes(), row_options);
  at::Tensor sink_rows, slope_parts, grad_bias;
  params.forward.output = output.mutable_data_ptr();
  params.forward.output_strides = strides3(output);
  params.forward.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.forward.row_stats = static_cast<float*>(row_stats.mutable_data_ptr());
  set_rows(params.forward, lse);
  params.grad_output = aligned_grad_output.const_data_ptr();
  params.grad_output_strides = strides3(aligned_grad_output);
  params.grad_lse = static_cast<const float*>(pointer(grad_lse));
  params.grad_query = grad_query.mutable_data_ptr();
  params.grad_key = grad_key.mutable_data_ptr();
  params.grad_value = grad_value.mutable_data_ptr();
  params.grad_query_strides = strides3(grad_query);
  params.grad_key_strides = strides3(grad_key);
  params.grad_value_strides = strides3(grad_value);
  params.delta = data<float>(delta);
  if (sinks_grad) {
    sink_rows = at::empty(lse.sizes(), row_options);
    params.grad_sink_rows = data<float>(sink_rows);
  }
  if (slopes_grad) {
    params.slope_partials = attention_backward_slope_partials(params.forward);
    slope_parts = at::empty({params.forward.batch, heads, params.slope_partials}, row_options);
    params.grad_slopes = data<float>(slope_parts);
  }
  if (mask_grad) {
    params.bias_batch = attn_mask->size(0);
    params.bias_heads = attn_mask->size(1);
    params.bias_rows = attn_mask->size(2);
    grad_bias = at::empty({params.bias_batch, params.bias_heads, params.bias_rows, seqlen_kv}, row_options);
    params.grad_bias = data<float>(grad_bias);
  }
  const WorkspaceBytes bytes = attention_backward_workspace(params);
  at::Tensor workspace = at::empty({bytes.total}, query.options().dtype(at::kByte));
  workspace.narrow(0, 0, bytes.zeroed).zero_();
  params.workspace = workspace.mutable_data_ptr();
  attention_backward(params, stream);

  if (mask_grad) {
    if (attn_mask->size(3) != seqlen_kv) grad_bias = grad_bias.sum(-1, true);
    grad_bias = grad_bias.to(attn_mask->scalar_type());
  }
  return {packed ? grad_packed : grad_query,
          packed ? at::empty({0}, query.options()) : grad_key,
          packed ? at::empty({0}, query.options()) : grad_value,
          mask_grad ? grad_bias : at::empty({0}, row_options),
          slopes_grad ? slope_parts.sum(-1) : at::empty({0}, row_options),
          sinks_grad ? sink_rows.sum(at::IntArrayRef{0, 2}) : at::empty({0}, row_options)};
}

}  // namespace mha_ext
