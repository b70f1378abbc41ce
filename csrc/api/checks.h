// Checks of operator arguments. Each names the argument and says what was expected and what came.
// They raise ValueError and TypeError in Python, and are the last line before a kernel reads memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "params.h"

namespace mha_ext {

inline void check_dtype(at::ScalarType dtype, const char* name, std::initializer_list<at::ScalarType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return;
  std::ostringstream expected;
  const char* separator = "";
  for (at::ScalarType each : allowed) {
    expected << separator << each;
    separator = ", ";
  }
  TORCH_CHECK_TYPE(false, name, ": expected dtype ", expected.str(), ", got ", dtype);
}

inline void check_dtype(const at::Tensor& tensor, const char* name, std::initializer_list<at::ScalarType> allowed) {
  check_dtype(tensor.scalar_type(), name, allowed);
}

inline void check_floating(const at::Tensor& tensor, const char* name) {
  check_dtype(tensor, name, {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble});
}

inline void check_rank(const at::Tensor& tensor, const char* name, int64_t rank) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, name, ": expected ", rank, " dimensions, got ", tensor.dim(), " (shape ",
                    tensor.sizes(), ")");
}

inline void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, ": expected shape ", shape, ", got ", tensor.sizes());
}

inline void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& like, const char* like_name) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, ": expected the device of ", like_name, ", ", like.device(),
                    ", got ", tensor.device());
}

// Kernels step along the last axis by one element.
inline void check_unit_last_stride(const at::Tensor& tensor, const char* name) {
  if (tensor.dim() == 0 || tensor.numel() == 0 || tensor.size(-1) == 1) return;
  TORCH_CHECK_VALUE(tensor.stride(-1) == 1, name, ": expected a last axis of stride 1, got strides ", tensor.strides());
}

inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": expected a contiguous tensor, got shape ", tensor.sizes(),
                    " with strides ", tensor.strides());
}

// A vector or matrix operand of a kernel, which reads it as it lies in memory.
inline void check_operand(const std::optional<at::Tensor>& tensor, const char* name, at::IntArrayRef shape,
                          at::ScalarType dtype, const at::Tensor& like, const char* like_name) {
  if (!tensor) return;
  check_shape(*tensor, name, shape);
  check_dtype(*tensor, name, {dtype});
  check_device(*tensor, name, like, like_name);
  check_contiguous(*tensor, name);
}

// Per-row, per-head and per-batch operands are read in the type in which a kernel computes.
inline at::ScalarType accumulator(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

inline DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBool: return DType::kBool;
    default: TORCH_CHECK_TYPE(false, "expected a floating-point dtype or bool, got ", dtype);
  }
}

inline const void* pointer(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

inline const int64_t* int64_pointer(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<int64_t>() : nullptr;
}

// The stride of an axis; 0 where the axis has one element, so that it can never spoil an alignment.
inline int64_t stride_of(const at::Tensor& tensor, int64_t axis) {
  return tensor.size(axis) > 1 ? tensor.stride(axis) : 0;
}

inline Strides3 strides3(const at::Tensor& tensor) {
  return {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2)};
}

inline Strides4 strides4(const at::Tensor& tensor) {
  return {stride_of(tensor, 0), stride_of(tensor, 1), stride_of(tensor, 2), stride_of(tensor, 3)};
}

}  // namespace mha_ext
