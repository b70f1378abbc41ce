// One way to launch a kernel: on a stream, with dynamic shared memory, checked, an exception on failure.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace mha_ext {

// A grid is one-dimensional (y and z end at 65 535); kernels stride over what exceeds it.
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

struct LaunchConfig {
  const char* name;   // for the error message
  int64_t grid;       // blocks, clamped to kMaxGrid
  int block;          // threads
  size_t shared = 0;  // bytes of dynamic shared memory
  cudaStream_t stream = nullptr;
};

inline void check_cuda(cudaError_t status, const LaunchConfig& config, int64_t grid) {
  if (status == cudaSuccess) return;
  std::ostringstream message;
  message << config.name << " <<<" << grid << ", " << config.block << ", " << config.shared
          << " B>>>: " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
  throw std::runtime_error(message.str());
}

template <typename... Params>
void launch(void (*kernel)(Params...), const LaunchConfig& config, const Params&... params) {
  if (config.grid <= 0) return;  // nothing to compute
  const int64_t grid = config.grid < kMaxGrid ? config.grid : kMaxGrid;
  constexpr size_t kDefaultShared = 48 * 1024;
  if (config.shared > kDefaultShared) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared)),
               config, grid);
  }
  cudaLaunchConfig_t cuda = {};
  cuda.gridDim = dim3(static_cast<unsigned>(grid));
  cuda.blockDim = dim3(static_cast<unsigned>(config.block));
  cuda.dynamicSmemBytes = config.shared;
  cuda.stream = config.stream;
  check_cuda(cudaLaunchKernelEx(&cuda, kernel, params...), config, grid);
}

}  // namespace mha_ext
