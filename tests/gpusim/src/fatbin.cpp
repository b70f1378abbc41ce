#include "fatbin.h"

#include <cstdint>
#include <cstring>

#include "fault.h"

namespace gpusim {

namespace {

struct Wrapper {
  std::uint32_t magic, version;
  const std::byte* data;
  const void* unused;
};

struct Header {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t payload_bytes;
};

struct Entry {
  std::uint16_t kind, version;  // kind 1: PTX, 2: machine code
  std::uint32_t header_bytes;
  std::uint64_t payload_bytes;
  std::uint32_t compressed_bytes;
  std::uint32_t options;
  std::uint16_t minor, major;
  std::uint32_t architecture;
};

constexpr std::uint32_t kWrapperMagic = 0x466243b1, kHeaderMagic = 0xba55ed50;

template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

std::string ptx_of_fat_binary(const void* address) {
  const auto wrapper = read<Wrapper>(static_cast<const std::byte*>(address));
  if (wrapper.magic != kWrapperMagic) throw Error("not a fat binary: the magic number is " + hex(wrapper.magic));
  const auto header = read<Header>(wrapper.data);
  if (header.magic != kHeaderMagic)
    throw Error("a fat binary of an unknown kind: the magic number is " + hex(header.magic));
  const std::byte* at = wrapper.data + header.header_bytes;
  const std::byte* end = at + header.payload_bytes;
  std::string best, found;
  std::uint32_t best_architecture = 0;
  bool compressed = false;
  while (at < end) {
    const auto entry = read<Entry>(at);
    if (entry.kind == 1 && entry.compressed_bytes == 0) {
      if (best.empty() || entry.architecture >= best_architecture) {
        const char* text_begin = reinterpret_cast<const char*>(at + entry.header_bytes);
        best.assign(text_begin, strnlen(text_begin, entry.payload_bytes));
        best_architecture = entry.architecture;
      }
    } else {
      compressed |= entry.kind == 1;
      found += text(found.empty() ? "" : ", ", entry.kind == 1 ? "compressed PTX" : "machine code", " for sm_",
                    entry.architecture);
    }
    at += entry.header_bytes + entry.payload_bytes;
  }
  if (!best.empty()) return best;
  throw Error("the simulator runs plain PTX, but this object holds " +
              (found.empty() ? std::string("nothing") : found) +
              (compressed ? "; compile with nvcc --compress-mode=none"
                          : "; compile with nvcc -gencode arch=compute_90a,code=compute_90a --compress-mode=none"));
}

}  // namespace gpusim
