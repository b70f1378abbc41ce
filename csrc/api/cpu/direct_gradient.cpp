// The backward of the short way: as mha_ext/fused.py has it, without Python.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

#include "api/cpu/attention_backward_cpu.h"
#include "api/cpu/attention_cpu.h"
#include "api/cpu/direct.h"

namespace mha_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a backward reads besides the gradient.
struct Saved {
  at::Tensor query, key, value, output, lse, row_stats, attn_mask, key_lengths;  // the last two may be undefined
  int64_t q_offset, window_left, window_right;
  double softcap, scale;

  explicit Saved(AutogradContext* context) {
    const variable_list tensors = context->get_saved_variables();
    at::Tensor* const names[] = {&query, &key, &value, &output, &lse, &row_stats, &attn_mask, &key_lengths};
    for (size_t i = 0; i < tensors.size(); ++i) *names[i] = tensors[i];
    q_offset = context->saved_data["q_offset"].toInt();
    window_left = context->saved_data["window_left"].toInt();
    window_right = context->saved_data["window_right"].toInt();
    softcap = context->saved_data["softcap"].toDouble();
    scale = context->saved_data["scale"].toDouble();
  }
};

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// By `run`, which takes the arguments of the operator.
template <typename Run>
variable_list gradients(const Saved& saved, const at::Tensor& grad_output, const Run& run) {
  const at::Tensor grad = grad_output.stride(-1) == 1 ? grad_output : grad_output.contiguous();
  at::Tensor mask = saved.attn_mask;
  while (mask.defined() && mask.dim() < 4) mask = mask.unsqueeze(0);
  const std::optional<at::Tensor> none;
  auto [query, key, value, grad_mask, grad_slopes, grad_sinks] =
      run(grad, none, saved.query, saved.key, saved.value, saved.output, saved.lse, saved.row_stats, if_defined(mask),
          if_defined(saved.key_lengths), none, none, none, none, none, none, saved.q_offset, saved.window_left,
          saved.window_right, saved.softcap, 0., saved.scale, false, false, false, false, false);
  return {query, key, value, {}};
}

// By plain PyTorch, through Python: what is differentiated again, and what a transform sees that no kernel knows (a
// tangent of the gradient, several gradients at once).
bool wants_plain() {
  return at::GradMode::is_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

variable_list differentiable_gradients(const Saved& saved, const at::Tensor& grad_output, AutogradContext* context) {
  namespace py = pybind11;
  const py::gil_scoped_acquire gil;
  const auto object = [](const at::Tensor& tensor) -> py::object {
    if (!tensor.defined()) return py::none();
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  };
  const py::tuple needs =
      py::make_tuple(context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2));
  const py::tuple found = py::module_::import("mha_ext.fused")
                              .attr("differentiable_direct")(
                                  object(saved.query), object(saved.key), object(saved.value), object(saved.attn_mask),
                                  object(saved.key_lengths), saved.q_offset, saved.window_left, saved.window_right,
                                  saved.softcap, saved.scale, object(grad_output), needs);
  variable_list result(4);
  for (size_t i = 0; i < 3; ++i) {
    const py::object gradient = found[i];
    if (!gradient.is_none()) result[i] = THPVariable_Unpack(gradient.ptr());
  }
  return result;
}

struct DirectAttention : torch::autograd::Function<DirectAttention> {
  static constexpr bool is_traceable = true;  // traced, the backward calls the operator

  static at::Tensor forward(AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const DirectCall* call) {
    const int64_t batch = query.size(0), heads = query.size(1), seqlen_q = query.size(2);
    at::Tensor output = empty_like_layout(query, value.size(3));
    const at::Tensor lse = at::detail::empty_cpu({batch, heads, seqlen_q}, at::kFloat);
    const at::Tensor row_stats = at::detail::empty_cpu({batch, heads, seqlen_q, 2}, at::kFloat);
    AttentionParams params = direct_params(*call, output);
    params.lse = lse.mutable_data_ptr<float>();
    params.row_stats = row_stats.mutable_data_ptr<float>();
    params.row_batch_stride = lse.stride(0);
    params.row_head_stride = lse.stride(1);
    compute_from_python(params);

    const auto or_undefined = [](const at::Tensor* tensor) { return tensor ? *tensor : at::Tensor(); };
    context->save_for_backward(
        {query, key, value, output, lse, row_stats, or_undefined(call->attn_mask), or_undefined(call->key_lengths)});
    context->saved_data["q_offset"] = call->rule.q_offset;
    context->saved_data["window_left"] = call->rule.window_left;
    context->saved_data["window_right"] = call->rule.window_right;
    context->saved_data["softcap"] = call->rule.softcap;
    context->saved_data["scale"] = call->scale;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Saved saved(context);
    if (wants_plain()) return differentiable_gradients(saved, grads[0], context);
    if (nobody_listens() && is_plain(grads[0]) && is_plain(saved.query)) {
      return gradients(saved, grads[0], attention_backward_cpu);
    }
    static const auto backward_operator = c10::Dispatcher::singleton()
                                              .findSchemaOrThrow("mha_ext::attention_backward_cpu", "")
                                              .typed<decltype(attention_backward_cpu)>();
    return gradients(saved, grads[0], [](const auto&... arguments) { return backward_operator.call(arguments...); });
  }
};

}  // namespace

at::Tensor attention_with_gradient(const DirectCall& call) {
  return DirectAttention::apply(call.query, call.key, call.value, &call);
}

}  // namespace mha_ext
