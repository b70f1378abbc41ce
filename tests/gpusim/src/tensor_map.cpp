#include "tensor_map.h"

#include <cstring>

namespace gpusim {

const char* encode_tiled(void* map, int element_bytes, unsigned rank, std::uint64_t address, const std::uint64_t* dims,
                         const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                         Swizzle swizzle) {
  if (reinterpret_cast<std::uintptr_t>(map) % 64) return "a tensor map lies at a multiple of 64 bytes";
  if (rank < 1 || rank > 5) return "the rank of a tensor map is 1 to 5";
  if (address % 16) return "a tensor begins at a multiple of 16 bytes";
  TensorMap m{};
  m.magic = kTensorMapMagic;
  m.address = address;
  m.rank = static_cast<std::uint8_t>(rank);
  m.element_bytes = static_cast<std::uint8_t>(element_bytes);
  m.swizzle = swizzle;
  for (unsigned i = 0; i < rank; ++i) {
    if (dims[i] < 1 || dims[i] > 1ull << 32) return "a dimension has 1 to 2^32 elements";
    if (box[i] < 1 || box[i] > 256) return "a box has 1 to 256 elements a dimension";
    if (steps[i] < 1 || steps[i] > 8) return "element strides are 1 to 8";
    m.dims[i] = static_cast<std::uint32_t>(dims[i] - 1);
    m.box[i] = static_cast<std::uint16_t>(box[i]);
    m.steps[i] = static_cast<std::uint16_t>(steps[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40) return "strides are multiples of 16 bytes below 2^40";
    m.strides[i - 1] = strides[i - 1];
  }
  const unsigned row = box[0] * static_cast<unsigned>(element_bytes);
  const unsigned span[] = {0, 32, 64, 128};
  if (row % 16) return "the inner dimension of a box is a multiple of 16 bytes";
  if (swizzle != Swizzle::none && row > span[static_cast<int>(swizzle)])
    return "the inner dimension of a box exceeds the swizzle";
  std::memcpy(map, &m, sizeof m);
  return "";
}

}  // namespace gpusim
