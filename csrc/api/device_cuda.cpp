#include <c10/cuda/CUDAStream.h>

#include "api/device.h"

namespace mha_ext::device {

c10::DispatchKey dispatch_key() { return c10::DispatchKey::CUDA; }

cudaStream_t current_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace mha_ext::device
