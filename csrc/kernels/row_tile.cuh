// A row of scores spread over the threads that share it: who holds which column, and how columns are read and written.
// Element types are a run-time matter here. The switch over them stands outside the unrolled loops, so that all
// loads of a tile are in flight together.
#pragma once

#include <limits>

#include "attention/dropout.h"
#include "attention/mask.h"
#include "device/types.h"
#include "device/warp.h"
#include "dispatch.h"
#include "launch.h"
#include "params.h"

namespace mha_ext {

constexpr int kVecColumns = 4;  // of a thread: one pack, or two of fp64

// Columns of a tile of kVecs * kVecColumns * kThreads columns, of which each thread holds kVecs * kVecColumns.
// In packs a thread holds kPack neighbours, which it moves in one access; else neighbouring threads hold neighbours, so
// that single loads coalesce.
template <typename Acc, int kVecs, int kThreads>
struct RowColumns {
  static constexpr int kTile = kVecs * kVecColumns * kThreads;
  static constexpr int kPack = sizeof(Acc) == 8 ? 2 : kVecColumns;  // at most 16 bytes
  bool packed;
  int tile_begin;
  int first, step;  // of this thread

  __device__ __forceinline__ RowColumns(bool packed, int thread, int tile_begin = 0)
      : packed(packed),
        tile_begin(tile_begin),
        first(tile_begin + (packed ? kPack * thread : thread)),
        step(packed ? 1 : kThreads) {}

  __device__ __forceinline__ int at(int vec, int element) const {
    return first + (vec * kVecColumns + element / kPack * kPack) * kThreads + element % kPack * step;
  }

  // Whether any, or all, columns that the threads hold of this vec lie in begin <= j < end.
  __device__ __forceinline__ bool overlaps(int vec, int begin, int end) const {
    const int vec_begin = tile_begin + vec * kVecColumns * kThreads;
    return vec_begin < end && vec_begin + kVecColumns * kThreads > begin;
  }
  __device__ __forceinline__ bool within(int vec, int begin, int end) const {
    const int vec_begin = tile_begin + vec * kVecColumns * kThreads;
    return vec_begin >= begin && vec_begin + kVecColumns * kThreads <= end;
  }
};

template <typename T, int kVecs>
using RowTile = T[kVecs][kVecColumns];

// Calls visit(vec, element) for the first of every kPack elements.
template <int kVecs, int kPack, typename Visit>
__device__ __forceinline__ void for_each_access(Visit&& visit) {
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
#pragma unroll
    for (int element = 0; element < kVecColumns; element += kPack) visit(vec, element);
  }
}

template <int kVecs, typename Visit>
__device__ __forceinline__ void for_each_element(Visit&& visit) {
  for_each_access<kVecs, 1>(visit);
}

// Calls visit(Type<T>{}) for the element type: fp64 goes with fp64 alone, the others are computed in fp32.
template <typename Acc, typename Visit>
__device__ __forceinline__ void visit_dtype(DType dtype, Visit&& visit) {
  if constexpr (std::is_same_v<Acc, double>) {
    visit(Type<double>{});
  } else if (dtype == DType::kFloat16) {
    visit(Type<__half>{});
  } else if (dtype == DType::kBFloat16) {
    visit(Type<__nv_bfloat16>{});
  } else {
    visit(Type<float>{});
  }
}

// Reads columns begin <= j < end of a row and hands each to put(vec, element, value).
template <typename T, typename Acc, int kVecs, int kThreads, typename Put>
__device__ __forceinline__ void read_row(const T* row, const RowColumns<Acc, kVecs, kThreads>& columns, int begin,
                                         int end, Put&& put) {
  if (columns.packed) {
    constexpr int kPack = RowColumns<Acc, kVecs, kThreads>::kPack;
    for_each_access<kVecs, kPack>([&](int vec, int first_element) {
      const int column = columns.at(vec, first_element);
      if (column + kPack > begin && column < end) {  // may hold a few more, inside the row
        const Pack<T, kPack> pack = load_pack<T, kPack>(row + column);
#pragma unroll
        for (int k = 0; k < kPack; ++k) put(vec, first_element + k, pack.at[k]);
      }
    });
  } else {
    const int first = columns.first;  // the step is kThreads here: a constant
    for_each_element<kVecs>([&](int vec, int element) {
      const int column = first + (vec * kVecColumns + element) * kThreads;
      if (column >= begin && column < end) put(vec, element, row[column]);
    });
  }
}

// The same for a row of run-time dtype, handed on as Acc.
template <typename Acc, int kVecs, int kThreads, typename Put>
__device__ __forceinline__ void read_tile(const void* base, DType dtype, int64_t row_offset,
                                          const RowColumns<Acc, kVecs, kThreads>& columns, int begin, int end,
                                          Put&& put) {
  visit_dtype<Acc>(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    read_row(static_cast<const T*>(base) + row_offset, columns, begin, end,
             [&](int vec, int element, T value) { put(vec, element, convert<Acc>(value)); });
  });
}

// tile = columns begin <= j < end of a row; elsewhere 0, or what else the pack holds.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void load_tile(RowTile<Acc, kVecs>& tile, const void* base, DType dtype, int64_t row_offset,
                                          const RowColumns<Acc, kVecs, kThreads>& columns, int begin, int end) {
  for_each_element<kVecs>([&](int vec, int element) { tile[vec][element] = Acc(0); });
  read_tile<Acc>(base, dtype, row_offset, columns, begin, end,
                 [&](int vec, int element, Acc value) { tile[vec][element] = value; });
}

template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void store_tile(const RowTile<Acc, kVecs>& tile, void* base, DType dtype, int64_t row_offset,
                                           const RowColumns<Acc, kVecs, kThreads>& columns, int end) {
  visit_dtype<Acc>(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* row = static_cast<T*>(base) + row_offset;
    if (columns.packed) {
      constexpr int kPack = RowColumns<Acc, kVecs, kThreads>::kPack;
      for_each_access<kVecs, kPack>([&](int vec, int first_element) {
        const int column = columns.at(vec, first_element);
        if (column < end) {
          Pack<T, kPack> pack;
#pragma unroll
          for (int k = 0; k < kPack; ++k) pack.at[k] = convert<T>(tile[vec][first_element + k]);
          store_pack(row + column, pack);
        }
      });
    } else {
      for_each_element<kVecs>([&](int vec, int element) {
        const int column = columns.first + (vec * kVecColumns + element) * kThreads;
        if (column < end) row[column] = convert<T>(tile[vec][element]);
      });
    }
  });
}

constexpr double kLargestFloat = std::numeric_limits<float>::max();

// What a mask element means to masked(): a bool, or the number to add. What is finite stays finite.
template <typename Acc, typename T>
__device__ __forceinline__ auto mask_value(T element) {
  if constexpr (std::is_same_v<T, bool>) {
    return element;
  } else if constexpr (std::is_same_v<T, double> && std::is_same_v<Acc, float>) {
    const bool finite = element > -kInfinity<double> && element < kInfinity<double>;
    return static_cast<float>(finite ? fmin(fmax(element, -kLargestFloat), kLargestFloat) : element);
  } else {
    return convert<Acc>(element);
  }
}

// Which columns j < end of a tile dropout keeps: bit vec * kVecColumns + element. A philox number serves columns j and
// j ^ 8, which two lanes of the warp hold: each of the two draws half of the numbers that they share. All lanes of the
// warp take part. A rolled loop: 32 numbers in flight would cost more registers than the row itself.
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ uint32_t kept_columns(const DropoutParams& params, uint32_t batch_head, int i,
                                                 const RowColumns<Acc, kVecs, kThreads>& columns, int end) {
  static_assert(kVecs * kVecColumns <= 32, "one bit a column");
  constexpr int kHalf = kVecColumns / 2;
  const DropoutSeed seed = dropout_seed(params.rng_state);
  const bool upper_query = random_word(i, 0) != 0;
  const bool upper_key = (columns.first & 8) != 0;  // true of all columns of this thread, or of none
  const int own_element = upper_key ? kHalf : 0, other_element = upper_key ? 0 : kHalf;
  const int lane_distance = columns.packed ? 8 / columns.kPack : 8;
  uint32_t kept = 0;
#pragma unroll 1
  for (int vec = 0; vec < kVecs && columns.overlaps(vec, 0, end); ++vec) {
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const RandomWords random = random_words(seed, batch_head, i, columns.at(vec, own_element + k));
      const uint32_t low = upper_query ? random.word[2] : random.word[0];
      const uint32_t high = upper_query ? random.word[3] : random.word[1];
      const uint32_t own = upper_key ? high : low;
      const uint32_t received = __shfl_xor_sync(kAllLanes, upper_key ? low : high, lane_distance);
      kept |= static_cast<uint32_t>(keeps(params, own)) << (vec * kVecColumns + own_element + k);
      kept |= static_cast<uint32_t>(keeps(params, received)) << (vec * kVecColumns + other_element + k);
    }
  }
  return kept;
}

// tile = tile * keep / (1 - p)
template <typename Acc, int kVecs, int kThreads>
__device__ __forceinline__ void drop_tile(RowTile<Acc, kVecs>& tile, const DropoutParams& params, uint32_t batch_head,
                                          int i, const RowColumns<Acc, kVecs, kThreads>& columns, int end) {
  const uint32_t kept = kept_columns(params, batch_head, i, columns, end);
  const Acc scale = static_cast<Acc>(params.keep_scale);
  for_each_element<kVecs>([&](int vec, int element) {
    const bool keep = (kept >> (vec * kVecColumns + element) & 1) != 0;
    tile[vec][element] = keep ? tile[vec][element] * scale : Acc(0);
  });
}

// How a block works on rows: kWarps_ warps share one, and a block has kRows of them. A warp alone needs no barrier, so
// that several fit a block.
template <typename Acc_, int kVecs_, int kWarps_, int kRows_ = 1>
struct RowBlock {
  static_assert(kWarps_ == 1 || kRows_ == 1, "a row shared by several warps has the block to itself");
  using Acc = Acc_;
  static constexpr int kVecs = kVecs_, kWarps = kWarps_, kRows = kRows_;
  static constexpr int kThreads = kWarpSize * kWarps;  // of a row
  static constexpr int kBlock = kThreads * kRows;
  using Columns = RowColumns<Acc, kVecs, kThreads>;

  // Blocks that shall fit on a multiprocessor, which bounds the registers of a thread: `tiles` of them and what is in
  // flight. Left alone, ptxas keeps the columns of a tile in registers too and hides less latency; with less it spills.
  static constexpr int min_blocks(int tiles) {
    constexpr bool kDouble = std::is_same_v<Acc, double>;
    const int vecs = tiles * kVecs;
    const int registers = vecs <= 2 ? (kDouble ? 104 : 64) : vecs <= 4 ? (kDouble ? 128 : 80) : (kDouble ? 255 : 128);
    return 64 * 1024 / (registers * kBlock);
  }
};

// The blocks for rows that stay in registers, by length; false for a longer row, which LongRowBlock reads in tiles.
// 32 columns a thread: fewer repeat the work that a warp does once a row, more do not fit registers.
template <typename Acc, typename Visit>
bool dispatch_row_block(int64_t seqlen_kv, Visit&& visit) {
  const auto fits = [&](auto block) {
    if (seqlen_kv > decltype(block)::Columns::kTile) return false;
    visit(block);
    return true;
  };
  return fits(RowBlock<Acc, 2, 1, 4>{}) || fits(RowBlock<Acc, 8, 1, 4>{}) || fits(RowBlock<Acc, 8, 4>{}) ||
         fits(RowBlock<Acc, 8, 8>{});
}

template <typename Acc>
using LongRowBlock = RowBlock<Acc, 2, 16>;

// Launches a kernel over all rows.
template <typename Block, typename Params, typename Rows>
void launch_rows(const char* name, void (*kernel)(Params, Rows), Block, const Params& params, const Rows& rows,
                 cudaStream_t stream) {
  const int64_t num_rows = params.batch * params.heads * params.seqlen_q;
  launch(kernel, {name, (num_rows + Block::kRows - 1) / Block::kRows, Block::kBlock, 0, stream}, params, rows);
}

// Which row a group of threads works on.
struct RowIndex {
  int batch, head, query;
  uint32_t batch_head;  // as dropout counts it

  __device__ __forceinline__ RowIndex(int64_t row, int64_t heads, int64_t seqlen_q) {
    const int64_t batch_and_head = row / seqlen_q;
    query = static_cast<int>(row - batch_and_head * seqlen_q);
    batch = static_cast<int>(batch_and_head / heads);
    head = static_cast<int>(batch_and_head - batch * heads);
    batch_head = static_cast<uint32_t>(batch_and_head);
  }

  __device__ __forceinline__ int64_t offset(const Strides3& strides) const {
    return batch * strides.batch + head * strides.head + query * strides.row;
  }
};

}  // namespace mha_ext
