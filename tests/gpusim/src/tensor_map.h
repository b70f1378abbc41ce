// The simulator's own content of a CUtensorMap (128 opaque bytes), written by its cuTensorMapEncodeTiled.
#pragma once

#include <cstdint>

namespace gpusim {

enum class Swizzle : std::uint8_t { none, bytes_32, bytes_64, bytes_128 };

struct TensorMap {
  std::uint64_t magic;
  std::uint64_t address;
  std::uint64_t strides[4];  // bytes, of dimensions 1 to 4
  std::uint32_t dims[5];     // elements, minus one
  std::uint16_t box[5], steps[5];
  std::uint8_t rank, element_bytes;
  Swizzle swizzle;
};
static_assert(sizeof(TensorMap) <= 128);

constexpr std::uint64_t kTensorMapMagic = 0x70616d5f6d697367ull;

// Where a byte of a tile goes: 16-byte chunks change places by the bits of the address above them.
constexpr std::uint32_t swizzled(std::uint32_t address, Swizzle mode) {
  switch (mode) {
    case Swizzle::none: return address;
    case Swizzle::bytes_32: return address ^ (address >> 7 & 1) << 4;
    case Swizzle::bytes_64: return address ^ (address >> 7 & 3) << 4;
    case Swizzle::bytes_128: return address ^ (address >> 7 & 7) << 4;
  }
  return address;
}

// "" or the reason why the arguments are refused. Strides are of dimensions 1 and up.
const char* encode_tiled(void* map, int element_bytes, unsigned rank, std::uint64_t address, const std::uint64_t* dims,
                         const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                         Swizzle swizzle);

}  // namespace gpusim
