// Where the 16-byte chunks of a tile lie in shared memory.
//
// A tile is rows of kRowBytes without padding. The chunks of a row are permuted by an XOR with the row number, so that
// the lanes of one request never meet in a bank, whether they write along a row (cp.async) or read down a column.
#pragma once

#include "host_device.h"

namespace mha_ext {

constexpr int kChunkBytes = 16;

enum class Swizzle {
  kChunkColumn,  // a request reads one chunk of each of 8 rows: ldmatrix
  kWordBlock,    // a request reads 8 words of each of 4 rows: 32-bit loads that transpose
};

template <Swizzle kSwizzle, int kRowBytes>
constexpr MHA_HOST_DEVICE int swizzle_chunk(int row, int chunk) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  static_assert(kRowBytes % (2 * kChunkBytes) == 0, "a row is an even number of 16-byte chunks");
  if constexpr (kSwizzle == Swizzle::kWordBlock) {
    static_assert(kChunks % 8 == 0, "rows of whole 128-byte lines");
    return chunk ^ ((row & 3) << 1);
  } else if constexpr (kChunks % 8 == 0) {
    return chunk ^ (row & 7);
  } else if constexpr (kChunks % 4 == 0) {
    return chunk ^ ((row >> 1) & 3);  // two rows a line
  } else {
    return chunk ^ ((row >> 2) & 1);  // four rows a line
  }
}

// After so many rows the pattern repeats: offsets then differ by whole rows.
template <Swizzle kSwizzle>
constexpr int kSwizzlePeriod = kSwizzle == Swizzle::kWordBlock ? 4 : 8;

// Bytes from the start of the tile.
template <Swizzle kSwizzle, int kRowBytes>
constexpr MHA_HOST_DEVICE int swizzled_offset(int row, int chunk) {
  return row * kRowBytes + swizzle_chunk<kSwizzle, kRowBytes>(row, chunk) * kChunkBytes;
}

// Whether chunks of a row whose numbers differ by an XOR lie that XOR apart, so that one address leads to all of them.
template <Swizzle kSwizzle, int kRowBytes>
constexpr bool chunks_flip() {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  if ((kChunks & (kChunks - 1)) != 0) return false;
  for (int row = 0; row < kSwizzlePeriod<kSwizzle>; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int flipped = swizzled_offset<kSwizzle, kRowBytes>(row, 0) ^ (chunk * kChunkBytes);
      if (flipped != swizzled_offset<kSwizzle, kRowBytes>(row, chunk)) return false;
    }
  }
  return true;
}

}  // namespace mha_ext
