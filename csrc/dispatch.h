// From a run-time value to a compile-time constant, over a short list, without macros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "params.h"

namespace mha_ext {

template <typename T>
struct Type {
  using type = T;
};

// Calls visit(Type<T>{}) for the element type of a floating-point DType.
template <typename Visit>
void dispatch_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat16: return visit(Type<__half>{});
    case DType::kBFloat16: return visit(Type<__nv_bfloat16>{});
    case DType::kFloat32: return visit(Type<float>{});
    case DType::kFloat64: return visit(Type<double>{});
    case DType::kBool: break;
  }
  throw std::invalid_argument("expected a floating-point dtype, got DType " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace mha_ext
