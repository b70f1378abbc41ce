// The short way from `mha_ext.attention` to the kernels of the CPU: for a call of everyday form, whose operator would
// cost more than its arithmetic.
//
// Nothing is refused here. What is not exactly of a form below is left to the ordinary way, which takes everything and
// words every error; the two agree bit for bit.
#include "api/cpu/direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "api/checks.h"
#include "api/cpu/attention_cpu.h"
#include "api/cpu/threads.h"
#include "api/score_rule.h"
#include "attention/mask.h"
#include "params.h"

namespace mha_ext {

bool nobody_listens() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  return (local.included_ - c10::default_included_set).empty() && local.excluded_.has(c10::DispatchKey::AutocastCPU) &&
         !at::impl::torch_function_mode_enabled() && !at::hasCallbacks() && !torch::jit::tracer::isTracing() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet ordinary(
      {c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU});
  return tensor.key_set() - ordinary == c10::DispatchKeySet(c10::DispatchKey::CPU);
}

AttentionParams direct_params(const DirectCall& call, const at::Tensor& output) {
  AttentionParams params = attention_params(call.query, call.key, call.value, output, call.scale);
  params.rule = call.rule;
  params.dropout = dropout_params(0, {}, call.query, "query");
  return params;
}

void compute_from_python(const AttentionParams& params) {
  if (flops_of(params) < kFlopsOfTwoThreads) return compute_attention(params);
  const pybind11::gil_scoped_release others_may_run;
  compute_attention(params);
}

namespace {

// The arguments of `mha_ext.attention`, in its order.
enum Argument {
  kQuery,
  kKey,
  kValue,
  kAttnMask,
  kDropoutP,
  kIsCausal,
  kScale,
  kEnableGqa,
  kWindow,
  kQOffset,
  kKeyLengths,
  kAlibiSlopes,
  kSoftcap,
  kSinks,
  kReturnLse,
  kReturnWeights,
  kReturnStats,
  kDeterministic,
  kArguments
};

// The tensor where it is an ordinary one in the CPU's memory.
const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return is_plain(tensor) ? &tensor : nullptr;
}

bool is_bool(PyObject* object) { return object == Py_True || object == Py_False; }

std::optional<double> finite_number(PyObject* object) {
  double number = NAN;
  if (PyFloat_CheckExact(object)) {
    number = PyFloat_AS_DOUBLE(object);
  } else if (PyLong_CheckExact(object)) {
    number = PyLong_AsDouble(object);
    if (number == -1 && PyErr_Occurred()) {  // too large
      PyErr_Clear();
      return {};
    }
  }
  return std::isfinite(number) ? std::optional(number) : std::nullopt;
}

std::optional<int64_t> integer(PyObject* object, int64_t low, int64_t high) {
  if (!PyLong_CheckExact(object)) return {};
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow || number < low || number > high ? std::nullopt : std::optional(number);
}

// One side of a window, -1 where it is unlimited.
std::optional<int64_t> window_side(PyObject* object) {
  return object == Py_None ? std::optional<int64_t>(-1) : integer(object, 0, 2 * kMaxAxis);
}

bool read_window(PyObject* window, bool is_causal, ScoreRuleParams& rule) {
  rule.window_left = rule.window_right = -1;
  if (window != Py_None) {
    if (!PyTuple_CheckExact(window) || PyTuple_GET_SIZE(window) != 2) return false;
    const auto left = window_side(PyTuple_GET_ITEM(window, 0)), right = window_side(PyTuple_GET_ITEM(window, 1));
    if (!left || !right) return false;
    rule.window_left = *left;
    rule.window_right = *right;
  }
  if (is_causal) rule.window_right = 0;
  return true;
}

bool read_q_offset(PyObject* offset, int64_t end, ScoreRuleParams& rule) {
  if (PyUnicode_CheckExact(offset)) {
    rule.q_offset = end;
    return PyUnicode_CompareWithASCIIString(offset, "end") == 0;
  }
  const std::optional<int64_t> number = integer(offset, -kMaxAxis, kMaxAxis);
  rule.q_offset = number.value_or(0);
  return number.has_value();
}

bool read_key_lengths(PyObject* object, DirectCall& call) {
  if (object == Py_None) return true;
  const at::Tensor* lengths = plain_tensor(object);
  if (!lengths || lengths->dim() != 1 || lengths->size(0) != call.query.size(0) ||
      lengths->scalar_type() != at::kLong || !lengths->is_contiguous()) {
    return false;
  }
  call.key_lengths = lengths;
  call.rule.key_lengths = lengths->const_data_ptr<int64_t>();
  return true;
}

// A mask that broadcasts to (B, Hq, Lq, Lk), of any strides.
bool read_mask(PyObject* object, bool may_need_grad, DirectCall& call) {
  if (object == Py_None) return true;
  const at::Tensor* mask = plain_tensor(object);
  if (!mask || mask->dim() > 4 || (may_need_grad && mask->requires_grad())) return false;
  const at::ScalarType dtype = mask->scalar_type();
  if (dtype != at::kBool && dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) return false;
  const int64_t shape[] = {call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2)};
  int64_t strides[4] = {0, 0, 0, 0};
  for (int64_t axis = 4 - mask->dim(), own = 0; axis < 4; ++axis, ++own) {
    if (mask->size(own) != 1 && mask->size(own) != shape[axis]) return false;
    strides[axis] = stride_of(*mask, own);
  }
  call.attn_mask = mask;
  call.rule.attn_mask = mask->const_data_ptr();
  call.rule.mask_strides = {strides[0], strides[1], strides[2], strides[3]};
  call.rule.mask_dtype = to_dtype(dtype);
  return true;
}

// Whether query, key and value are what the kernels take, and nothing is empty.
bool fit(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::ScalarType dtype = query.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  for (const at::Tensor* each : {&query, &key, &value}) {
    if (each->scalar_type() != dtype || each->dim() != 4 || each->stride(3) != 1 || each->numel() == 0) return false;
    for (int64_t size : each->sizes()) {
      if (size > kMaxAxis) return false;
    }
    if (each->size(3) > kMaxCpuHeadDim) return false;
  }
  return key.size(0) == query.size(0) && value.size(0) == query.size(0) && key.size(3) == query.size(3) &&
         value.size(1) == key.size(1) && value.size(2) == key.size(2) && query.size(1) % key.size(1) == 0;
}

// The output, or null where the call is left to the ordinary way.
PyObject* attention(PyObject* const* arguments) {
  for (Argument unused : {kAlibiSlopes, kSinks}) {
    if (arguments[unused] != Py_None) return nullptr;
  }
  for (Argument unused : {kReturnLse, kReturnWeights, kReturnStats}) {
    if (arguments[unused] != Py_False) return nullptr;
  }
  PyObject *const is_causal = arguments[kIsCausal], *const deterministic = arguments[kDeterministic];
  if (!is_bool(is_causal) || !is_bool(arguments[kEnableGqa])) return nullptr;
  if (deterministic != Py_None && !is_bool(deterministic)) return nullptr;
  const std::optional<double> dropout_p = finite_number(arguments[kDropoutP]);
  if (!dropout_p || *dropout_p != 0 || !nobody_listens()) return nullptr;

  const at::Tensor* const query = plain_tensor(arguments[kQuery]);
  const at::Tensor* const key = plain_tensor(arguments[kKey]);
  const at::Tensor* const value = plain_tensor(arguments[kValue]);
  if (!query || !key || !value || !fit(*query, *key, *value)) return nullptr;
  DirectCall call = {*query, *key, *value};
  call.rule.mask_dtype = DType::kBool;
  const bool grad_mode = at::GradMode::is_enabled();
  if (!read_window(arguments[kWindow], is_causal == Py_True, call.rule) ||
      !read_q_offset(arguments[kQOffset], key->size(2) - query->size(2), call.rule) ||
      !read_key_lengths(arguments[kKeyLengths], call) || !read_mask(arguments[kAttnMask], grad_mode, call)) {
    return nullptr;
  }
  if (arguments[kSoftcap] != Py_None) {
    const std::optional<double> softcap = finite_number(arguments[kSoftcap]);
    if (!softcap || *softcap <= 0) return nullptr;
    call.rule.softcap = *softcap;
  }
  call.scale = 1 / std::sqrt(static_cast<double>(query->size(3)));
  if (arguments[kScale] != Py_None) {
    const std::optional<double> scale = finite_number(arguments[kScale]);
    if (!scale) return nullptr;
    call.scale = *scale;
  }

  if (grad_mode && (query->requires_grad() || key->requires_grad() || value->requires_grad())) {
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return nullptr;
    return THPVariable_Wrap(attention_with_gradient(call));
  }
  at::Tensor output = empty_like_layout(*query, value->size(3));
  compute_from_python(direct_params(call, output));
  return THPVariable_Wrap(std::move(output));
}

PyObject* attention_direct(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* output = nullptr;
  try {
    if (count == kArguments) output = attention(arguments);
  } catch (...) {  // the ordinary way meets it again, and says what it is
  }
  if (output) return output;
  PyErr_Clear();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attention_direct", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&attention_direct)), METH_FASTCALL,
     "The output of mha_ext.attention for all its arguments but backend, by position; None: go the ordinary way"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_attention_direct(PyObject* module) {
  if (PyModule_AddFunctions(module, methods) != 0) throw pybind11::error_already_set();
}

}  // namespace mha_ext
