// Everything asked of the CUDA runtime through torch. The one seam: another implementation can be linked in its place.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <cuda_runtime.h>

namespace mha_ext::device {

// Under which key the operators are registered: the device type whose tensors they take.
c10::DispatchKey dispatch_key();

// The stream that torch is working on for this device.
cudaStream_t current_stream(const c10::Device& device);

}  // namespace mha_ext::device
