// Launchers of qkv_split and of its gradient, qkv_merge.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace mha_ext {

void launch_qkv_split(const QkvSplitParams& params, cudaStream_t stream);
void launch_qkv_merge(const QkvMergeParams& params, cudaStream_t stream);

// In how many chunks of rows the gradient of the bias is summed: enough threads to fill a GPU, few enough partial sums.
// It depends on the shape alone, and so does the order in which rows are added.
constexpr int qkv_merge_row_chunks(int64_t rows) {
  constexpr int64_t kRowsPerChunk = 32, kMaxChunks = 1024;
  const int64_t chunks = (rows + kRowsPerChunk - 1) / kRowsPerChunk;
  return static_cast<int>(chunks < kMaxChunks ? chunks : kMaxChunks);
}

}  // namespace mha_ext
