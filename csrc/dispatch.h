// From a run-time value to a compile-time constant, over a short list, without macros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

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

// Calls visit(std::integral_constant<int, bound>{}) with the first of the ascending bounds that is >= value;
// false when the value exceeds them all.
template <int kBound, int... kMore, typename Visit>
bool dispatch_bound(int64_t value, Visit&& visit) {
  if (value <= kBound) {
    visit(std::integral_constant<int, kBound>{});
    return true;
  }
  if constexpr (sizeof...(kMore) > 0) {
    return dispatch_bound<kMore...>(value, visit);
  } else {
    return false;
  }
}

}  // namespace mha_ext
