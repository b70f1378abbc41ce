// attn_mask in the form that fused attention reads: one bit an element, and what each block of 64 x 64 shows.
//
// A warp takes 512 keys of a query at a time and lane l keeps the bits of keys 16 l .. 16 l + 15, so that all bits of
// the query leave in one store, and four lanes know what it shows of a block.
#pragma once

#include "attention/online_softmax.h"
#include "device/types.h"
#include "device/warp.h"
#include "dispatch.h"
#include "kernels/attention.h"
#include "launch.h"

namespace mha_ext {

constexpr int kMaskWarps = 8;
constexpr int kLaneKeys = 16;  // bool: 16 bytes
constexpr int kMaskSpan = kLaneKeys * kWarpSize;
constexpr int kSpanBlocks = kMaskSpan / kMaskBlock;
constexpr int kBlockLanes = kMaskBlock / kLaneKeys;

// How a mask is cut, worked out on the host.
struct MaskCut {
  int key_blocks, key_spans, query_blocks;
  int heads;     // of attn_mask
  int heads_kv;  // of key_bits
  int group;     // heads that share one of them

  explicit MaskCut(const MaskBlocksParams& p)
      : key_blocks(parts(p.seqlen_kv, kMaskBlock)),
        key_spans(parts(p.seqlen_kv, kMaskSpan)),
        query_blocks(parts(p.mask_rows, kMaskBlock)),
        heads(static_cast<int>(p.mask_heads)),
        heads_kv(heads > 1 ? heads / p.group : 1),
        group(heads > 1 ? p.group : 1) {}

  static int parts(int64_t length, int part) { return static_cast<int>((length + part - 1) / part); }
};

// ---- 512 keys of a query ----

template <typename T>
__device__ __forceinline__ bool is_visible(T element) {
  if constexpr (std::is_same_v<T, bool>) {
    return element;
  } else {
    return convert<Accumulator<T>>(element) != -kInfinity<Accumulator<T>>;
  }
}

// A lane's bits, 0 beyond the last key. Of keys at any stride: neighbouring lanes read neighbours.
template <typename T>
__device__ __forceinline__ uint32_t lane_bits(const T* row, int64_t key_stride, int keys_left, int lane) {
  uint32_t bits = 0;
#pragma unroll 4
  for (int word = 0; word < kMaskSpan / kWarpSize; ++word) {
    const int key = word * kWarpSize + lane;
    const bool visible = key < keys_left && is_visible(row[key * key_stride]);
    const uint32_t ballot = __ballot_sync(kAllLanes, visible);
    if (lane / 2 == word) bits = lane % 2 ? ballot >> kLaneKeys : ballot & 0xffff;
  }
  return bits;
}

// The same of contiguous keys, where a lane may read its own at once.
__device__ __forceinline__ uint32_t lane_bits_of_pack(const bool* row, int keys_left, int lane) {
  if (lane * kLaneKeys >= keys_left) return 0;
  const auto bytes = load_pack<uint32_t, 4>(reinterpret_cast<const uint32_t*>(row + lane * kLaneKeys));
  uint32_t bits = 0;
#pragma unroll
  for (int word = 3; word >= 0; --word) {
    const uint32_t x = bytes.at[word];
    const uint32_t nonzero = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) & 0x80808080;  // the upper bit of each byte
    const uint32_t gathered = nonzero * 0x00204081;  // bits 7, 15, 23, 31 to 28 .. 31; the others stay below
    bits = __funnelshift_l(gathered, bits, 4);
  }
  return bits;
}

// Where a span begins in row (b, h, i) of attn_mask.
template <typename T>
__device__ __forceinline__ const T* mask_row(const MaskBlocksParams& p, int64_t b, int64_t h, int64_t i, int64_t span) {
  const Strides4& s = p.mask_strides;
  return static_cast<const T*>(p.attn_mask) + b * s.batch + h * s.head + i * s.row + span * kMaskSpan * s.col;
}

// row: key_blocks words of 64 bits, a quarter of one for each lane.
__device__ __forceinline__ void store_bits(uint64_t* row, int key_blocks, int span, uint32_t bits, int lane) {
  const int at = span * kWarpSize + lane;
  if (at < key_blocks * kBlockLanes) reinterpret_cast<uint16_t*>(row)[at] = static_cast<uint16_t>(bits);
}

// ---- the kernels ----

// A block of threads: 64 queries by 512 keys, the queries to its warps in turn.
template <bool kPacks>
__global__ __launch_bounds__(kMaskWarps* kWarpSize) void mask_bits_kernel(const __grid_constant__ MaskBlocksParams p,
                                                                          const __grid_constant__ MaskCut cut) {
  __shared__ uint32_t any_smem[kMaskWarps], all_smem[kMaskWarps];  // a bit a lane
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int index = static_cast<int>(blockIdx.x);
  const int span = index % cut.key_spans, query_block = index / cut.key_spans % cut.query_blocks;
  const int slice = index / cut.key_spans / cut.query_blocks;
  const int b = slice / cut.heads, h = slice % cut.heads;
  const int keys_left = static_cast<int>(p.seqlen_kv) - span * kMaskSpan;

  // bits
  uint32_t any = 0, all = ~0u;
  const int i_end = min((query_block + 1) * kMaskBlock, static_cast<int>(p.mask_rows));
#pragma unroll 1
  for (int i = query_block * kMaskBlock + warp; i < i_end; i += kMaskWarps) {
    const bool* row = mask_row<bool>(p, b, h, i, span);
    const uint32_t bits =
        kPacks ? lane_bits_of_pack(row, keys_left, lane) : lane_bits(row, p.mask_strides.col, keys_left, lane);
    store_bits(p.bits + (int64_t{slice} * p.mask_rows + i) * cut.key_blocks, cut.key_blocks, span, bits, lane);
    any |= bits;
    all &= bits;
  }

  // map
  any_smem[warp] = __ballot_sync(kAllLanes, any != 0);
  all_smem[warp] = __ballot_sync(kAllLanes, (all & 0xffff) == 0xffff);
  __syncthreads();
  const int key_block = span * kSpanBlocks + threadIdx.x;
  if (threadIdx.x < kSpanBlocks && key_block < cut.key_blocks) {
    const uint32_t lanes = ((1u << kBlockLanes) - 1) << (threadIdx.x * kBlockLanes);
    any = 0, all = lanes;
#pragma unroll
    for (int w = 0; w < kMaskWarps; ++w) {
      any |= any_smem[w] & lanes;
      all &= all_smem[w];
    }
    p.map[(int64_t{slice} * cut.query_blocks + query_block) * cut.key_blocks + key_block] =
        all == lanes ? BlockVisibility::kAll : (any ? BlockVisibility::kSome : BlockVisibility::kNone);
  }
}

// A warp: 512 keys of a key head. The mask repeats the query axis: a head has one row.
template <typename T>
__global__ __launch_bounds__(kMaskWarps* kWarpSize) void key_bits_kernel(const __grid_constant__ MaskBlocksParams p,
                                                                         const __grid_constant__ MaskCut cut) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t index = int64_t{blockIdx.x} * kMaskWarps + threadIdx.x / kWarpSize;
  const int span = static_cast<int>(index % cut.key_spans);
  const int64_t slice = index / cut.key_spans;
  if (slice >= p.mask_batch * cut.heads_kv) return;
  const int b = static_cast<int>(slice / cut.heads_kv), head_kv = static_cast<int>(slice % cut.heads_kv);
  const int keys_left = static_cast<int>(p.seqlen_kv) - span * kMaskSpan;

  uint32_t bits = 0;
  for (int h = head_kv * cut.group; h < (head_kv + 1) * cut.group; ++h) {
    const T* row = mask_row<T>(p, b, h, 0, span);
    bits |= lane_bits(row, p.mask_strides.col, keys_left, lane);
  }
  store_bits(p.key_bits + slice * cut.key_blocks, cut.key_blocks, span, bits, lane);
}

// ---- the launcher ----

template <typename T>
void launch_key_bits(const MaskBlocksParams& p, const MaskCut& cut, cudaStream_t stream) {
  const int64_t warps = p.mask_batch * cut.heads_kv * cut.key_spans;
  launch(key_bits_kernel<T>, {"key_bits", (warps + kMaskWarps - 1) / kMaskWarps, kMaskWarps * kWarpSize, 0, stream}, p,
         cut);
}

void mask_blocks(const MaskBlocksParams& p, cudaStream_t stream) {
  const MaskCut cut(p);
  const Strides4& s = p.mask_strides;
  if (p.bits) {
    const bool packs = s.col == 1 && p.seqlen_kv % kLaneKeys == 0 &&
                       packs_align(p.attn_mask, p.mask_dtype, kLaneKeys, s.batch, s.head, s.row);
    const int64_t blocks = p.mask_batch * p.mask_heads * cut.query_blocks * cut.key_spans;
    launch(packs ? mask_bits_kernel<true> : mask_bits_kernel<false>,
           {"mask_bits", blocks, kMaskWarps * kWarpSize, 0, stream}, p, cut);
  }
  if (!p.key_bits) return;
  if (p.mask_dtype == DType::kBool) return launch_key_bits<bool>(p, cut, stream);
  dispatch_dtype(p.mask_dtype, [&](auto type) { launch_key_bits<typename decltype(type)::type>(p, cut, stream); });
}

}  // namespace mha_ext
