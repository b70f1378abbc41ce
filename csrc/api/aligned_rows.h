// Tensors whose rows start on multiples of 16 bytes, as kernels that copy 16 bytes at a time want them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "api/checks.h"

namespace mha_ext {

// Whatever the length of the rows: their pitch is a multiple of 8 elements.
// By its strides and not as a part of a longer tensor: autograd refuses to change a view among several outputs.
inline at::Tensor empty_aligned_rows(at::IntArrayRef shape, const at::TensorOptions& options) {
  constexpr int64_t kPitch = 8;
  std::vector<int64_t> strides(shape.size(), 1);
  int64_t stride = (shape.back() + kPitch - 1) / kPitch * kPitch;
  for (size_t axis = shape.size() - 1; axis-- > 0;) {
    strides[axis] = std::max<int64_t>(stride, 1);
    stride = strides[axis] * shape[axis];
  }
  return at::empty_strided(shape, strides, options);
}

// Whether every row of a (batch, head, row, col) tensor starts on a multiple of `bytes`.
inline bool rows_align(const at::Tensor& tensor, int64_t bytes) {
  if (tensor.numel() == 0) return true;
  const int64_t element = tensor.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
  for (int64_t axis = 0; axis < 3; ++axis) aligned = aligned && stride_of(tensor, axis) * element % bytes == 0;
  return aligned;
}

// The tensor itself, or a copy that is aligned.
inline at::Tensor aligned_rows(const at::Tensor& tensor) {
  if (rows_align(tensor, 16)) return tensor;
  return empty_aligned_rows(tensor.sizes(), tensor.options()).copy_(tensor);
}

}  // namespace mha_ext
