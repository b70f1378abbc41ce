// The dynamic shared memory of a block, seen as one struct.
#pragma once

#include <cstdint>

namespace mha_ext {

template <typename Storage>
__device__ __forceinline__ Storage& shared_storage() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  return *reinterpret_cast<Storage*>(dynamic_shared);
}

// The 32-bit address that ldmatrix, cp.async and ld.shared take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace mha_ext
