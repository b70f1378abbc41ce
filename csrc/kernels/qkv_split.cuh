// query, key, value <- packed + bias, and back. Both move each element once, in packs of 16 bytes where all agree on
// them. A row of packed is one token: all query heads, then all key heads, then all value heads. instances/qkv_split.cu
// compiles this file; everyone else includes qkv_split.h.
#pragma once

#include "device/types.h"
#include "dispatch.h"
#include "kernels/qkv_split.h"
#include "launch.h"

namespace mha_ext {

constexpr int kQkvBlock = 256;

// Where a column of packed belongs.
struct QkvColumn {
  int part;  // 0: query, 1: key, 2: value
  int head;  // of that part
  int col;   // of that head

  __device__ __forceinline__ QkvColumn(int column, int num_heads_q, int num_heads_kv, int head_dim) {
    const int packed_head = column / head_dim;
    col = column - packed_head * head_dim;
    part = packed_head < num_heads_q ? 0 : (packed_head < num_heads_q + num_heads_kv ? 1 : 2);
    head = packed_head - (part > 0 ? num_heads_q : 0) - (part > 1 ? num_heads_kv : 0);
  }
};

template <typename T, int kPack>
__global__ __launch_bounds__(kQkvBlock) void qkv_split_kernel(const __grid_constant__ QkvSplitParams params) {
  const int columns = (params.num_heads_q + 2 * params.num_heads_kv) * params.head_dim;
  const int packs = columns / kPack;  // of a row
  const int64_t at = int64_t{blockIdx.x} * kQkvBlock + threadIdx.x;
  if (at >= params.batch * params.seqlen * packs) return;
  const int64_t row = at / packs;
  const int column = static_cast<int>(at - row * packs) * kPack;
  const int64_t b = row / params.seqlen, i = row - b * params.seqlen;

  const T* source =
      static_cast<const T*>(params.packed) + b * params.packed_batch_stride + i * params.packed_row_stride;
  Pack<T, kPack> pack = load_pack<T, kPack>(source + column);
  if (params.bias) {
    const Pack<T, kPack> bias = load_pack<T, kPack>(static_cast<const T*>(params.bias) + column);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      pack.at[k] = convert<T>(convert<Accumulator<T>>(pack.at[k]) + convert<Accumulator<T>>(bias.at[k]));
    }
  }

  const QkvColumn to(column, params.num_heads_q, params.num_heads_kv, params.head_dim);
  void* part = to.part == 0 ? params.query : (to.part == 1 ? params.key : params.value);
  const int64_t heads = to.part == 0 ? params.num_heads_q : params.num_heads_kv;
  const int64_t target_row = (b * heads + to.head) * params.seqlen + i;
  store_pack(static_cast<T*>(part) + target_row * params.head_dim + to.col, pack);
}

// A thread owns one pack of columns and walks down one chunk of rows, adding up its columns as it goes.
template <typename T, int kPack>
__global__ __launch_bounds__(kQkvBlock) void qkv_merge_kernel(const __grid_constant__ QkvMergeParams params) {
  using Acc = Accumulator<T>;
  const int columns = (params.num_heads_q + 2 * params.num_heads_kv) * params.head_dim;
  const int packs = columns / kPack;
  const int64_t rows = params.batch * params.seqlen;
  const int64_t rows_per_chunk = (rows + params.num_row_chunks - 1) / params.num_row_chunks;
  const int64_t at = int64_t{blockIdx.x} * kQkvBlock + threadIdx.x;
  if (at >= int64_t{params.num_row_chunks} * packs) return;
  const int64_t chunk = at / packs;
  const int column = static_cast<int>(at - chunk * packs) * kPack;

  const QkvColumn from(column, params.num_heads_q, params.num_heads_kv, params.head_dim);
  const void* part = from.part == 0 ? params.grad_query : (from.part == 1 ? params.grad_key : params.grad_value);
  const Strides3& strides =
      from.part == 0 ? params.query_strides : (from.part == 1 ? params.key_strides : params.value_strides);
  const T* source = static_cast<const T*>(part) + from.head * strides.head + from.col;
  const int64_t row_step = strides.row, batch_step = strides.batch - params.seqlen * strides.row;
  T* target = static_cast<T*>(params.grad_packed) + column;

  const int64_t first_row = chunk * rows_per_chunk;
  const int64_t row_end = first_row + rows_per_chunk < rows ? first_row + rows_per_chunk : rows;
  int64_t i = first_row % params.seqlen;
  source += first_row / params.seqlen * strides.batch + i * row_step;
  Acc sum[kPack] = {};
  constexpr int kInFlight = 4;  // rows read before the first of them is written
  for (int64_t row = first_row; row < row_end; row += kInFlight) {
    Pack<T, kPack> packs_of_rows[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (row + k >= row_end) break;
      packs_of_rows[k] = load_pack<T, kPack>(source);
      source += row_step;
      if (++i == params.seqlen) {
        i = 0;
        source += batch_step;
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (row + k >= row_end) break;
      store_pack(target + (row + k) * columns, packs_of_rows[k]);
#pragma unroll
      for (int each = 0; each < kPack; ++each) sum[each] += convert<Acc>(packs_of_rows[k].at[each]);
    }
  }

  if (params.bias_partial) {
    Acc* partial = static_cast<Acc*>(params.bias_partial) + chunk * columns + column;
#pragma unroll
    for (int k = 0; k < kPack; ++k) partial[k] = sum[k];
  }
}

// Calls visit(Type<T>{}, pack size): 16 bytes where `aligned(pack size)` holds, else one element.
template <typename Aligned, typename Visit>
void dispatch_pack(DType dtype, Aligned&& aligned, Visit&& visit) {
  dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kPack = 16 / sizeof(T);
    if (aligned(kPack)) {
      visit(type, std::integral_constant<int, kPack>{});
    } else {
      visit(type, std::integral_constant<int, 1>{});
    }
  });
}

inline int64_t blocks_of(int64_t threads) { return (threads + kQkvBlock - 1) / kQkvBlock; }

void launch_qkv_split(const QkvSplitParams& params, cudaStream_t stream) {
  const auto aligned = [&](int pack) {
    const auto packs = [&](const void* base, auto... strides) {
      return packs_align(base, params.dtype, pack, strides...);
    };
    return params.head_dim % pack == 0 && packs(params.packed, params.packed_batch_stride, params.packed_row_stride) &&
           packs(params.bias) && packs(params.query) && packs(params.key) && packs(params.value);
  };
  dispatch_pack(params.dtype, aligned, [&](auto type, auto pack) {
    using T = typename decltype(type)::type;
    const int64_t columns = int64_t{params.num_heads_q + 2 * params.num_heads_kv} * params.head_dim;
    const int64_t threads = params.batch * params.seqlen * (columns / pack);
    launch(qkv_split_kernel<T, pack>, {"qkv_split", blocks_of(threads), kQkvBlock, 0, stream}, params);
  });
}

void launch_qkv_merge(const QkvMergeParams& params, cudaStream_t stream) {
  const auto aligned = [&](int pack) {
    const auto packs = [&](const void* base, const Strides3& strides) {
      return packs_align(base, params.dtype, pack, strides.batch, strides.head, strides.row);
    };
    return params.head_dim % pack == 0 && packs(params.grad_query, params.query_strides) &&
           packs(params.grad_key, params.key_strides) && packs(params.grad_value, params.value_strides) &&
           packs_align(params.grad_packed, params.dtype, pack);
  };
  dispatch_pack(params.dtype, aligned, [&](auto type, auto pack) {
    using T = typename decltype(type)::type;
    const int64_t columns = int64_t{params.num_heads_q + 2 * params.num_heads_kv} * params.head_dim;
    const int64_t threads = params.num_row_chunks * (columns / pack);
    launch(qkv_merge_kernel<T, pack>, {"qkv_merge", blocks_of(threads), kQkvBlock, 0, stream}, params);
  });
}

}  // namespace mha_ext
