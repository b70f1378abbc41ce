// One way to launch a kernel: on a stream, with dynamic shared memory, checked, an exception on failure.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace mha_ext {

// A grid is one-dimensional (y and z end at 65 535).
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

struct LaunchConfig {
  const char* name;   // for the error message
  int64_t grid;       // blocks, at most kMaxGrid
  int block;          // threads
  size_t shared = 0;  // bytes of dynamic shared memory
  cudaStream_t stream = nullptr;
};

template <typename... Reason>
[[noreturn]] void fail_launch(const LaunchConfig& config, const Reason&... reason) {
  std::ostringstream message;
  message << config.name << " <<<" << config.grid << ", " << config.block << ", " << config.shared << " B>>>: ";
  (message << ... << reason);
  throw std::runtime_error(message.str());
}

inline void check_cuda(cudaError_t status, const LaunchConfig& config) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // else the next to ask for it would report this error again
  fail_launch(config, cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

template <typename... Params>
void launch(void (*kernel)(Params...), const LaunchConfig& config, const Params&... params) {
  if (config.grid <= 0) return;  // nothing to compute
  if (config.grid > kMaxGrid) fail_launch(config, "expected a grid of at most ", kMaxGrid, " blocks");
  constexpr size_t kDefaultShared = 48 * 1024;
  if (config.shared > kDefaultShared) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared)),
               config);
  }
  cudaLaunchConfig_t cuda = {};
  cuda.gridDim = dim3(static_cast<unsigned>(config.grid));
  cuda.blockDim = dim3(static_cast<unsigned>(config.block));
  cuda.dynamicSmemBytes = config.shared;
  cuda.stream = config.stream;
  check_cuda(cudaLaunchKernelEx(&cuda, kernel, params...), config);
}

}  // namespace mha_ext
