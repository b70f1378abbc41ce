// The symbols of the CUDA runtime that a compiled object needs: registration, launch, attributes, memory, streams.
// Device memory is host memory, every stream is done at once.
#include <cuda_runtime_api.h>

#include <algorithm>

#include <cstdlib>
#include <cstring>

#include "config.h"
#include "fault.h"
#include "launch.h"
#include "memory.h"
#include "registry.h"
#include "tensor_map.h"

using gpusim::config;
using gpusim::find_kernel;
using gpusim::Kernel;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(Kernel* kernel, dim3 grid, dim3 block, void** args, std::size_t shared) {
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  gpusim::Launch l;
  l.program = &kernel->program();
  l.config = config();
  const dim3 dims[2] = {grid, block};
  for (int i = 0; i < 2; ++i) {
    unsigned* to = i ? l.block : l.grid;
    to[0] = dims[i].x, to[1] = dims[i].y, to[2] = dims[i].z;
  }
  if (shared > 0xffffffffu) return result(cudaErrorInvalidValue);
  l.dynamic_shared = static_cast<std::uint32_t>(shared);
  if (l.shared_total() > static_cast<std::uint32_t>(gpusim::shared_limit(l.config.architecture))) {
    throw gpusim::Error(gpusim::text("kernel ", kernel->name, ": needs ", l.shared_total(),
                                     " bytes of shared memory, a block of sm_", l.config.architecture, " has at most ",
                                     gpusim::shared_limit(l.config.architecture)));
  }
  if (static_cast<int>(shared) > kernel->max_dynamic_shared) return result(cudaErrorInvalidValue);
  l.params.resize(l.program->param_bytes + 128);
  const auto base = reinterpret_cast<std::uintptr_t>(l.params.data());
  std::byte* params = l.params.data() + ((base + 63) / 64 * 64 - base);
  l.param_base = params;
  for (std::size_t i = 0; i < l.program->params.size(); ++i) {
    std::memcpy(params + l.program->params[i].offset, args[i], l.program->params[i].bytes);
  }
  gpusim::run_launch(l);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// registration ----------------------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) { return reinterpret_cast<void**>(gpusim::add_fat_binary(wrapper)); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { gpusim::remove_binary(reinterpret_cast<gpusim::Binary*>(handle)); }
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void** handle, const char* host_function, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  gpusim::add_kernel(reinterpret_cast<gpusim::Binary*>(handle), host_function, name);
}

void __cudaRegisterVar(void** handle, char* host_variable, char*, const char* name, int, std::size_t, int, int) {
  gpusim::add_variable(reinterpret_cast<gpusim::Binary*>(handle), host_variable, name);
}

// launch ----------------------------------------------------------------------------------------------------------

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (configurations.empty()) return result(cudaErrorMissingConfiguration);
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* function) {
  Kernel* kernel = find_kernel(function);
  *handle = reinterpret_cast<cudaKernel_t>(kernel);
  return result(kernel ? cudaSuccess : cudaErrorInvalidDeviceFunction);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, std::size_t shared,
                               cudaStream_t) {
  return launch(find_kernel(kernel), grid, block, args, shared);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, std::size_t shared,
                                    cudaStream_t) {
  return launch(find_kernel(kernel), grid, block, args, shared);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, std::size_t shared,
                             cudaStream_t) {
  return launch(find_kernel(function), grid, block, args, shared);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** args, std::size_t shared,
                                        cudaStream_t) {
  return launch(find_kernel(function), grid, block, args, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* function, void** args) {
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& cluster = c->attrs[i].val.clusterDim;
    if (cluster.x * cluster.y * cluster.z > 1) throw gpusim::Error("the simulator runs clusters of one block only");
  }
  return launch(find_kernel(function), c->gridDim, c->blockDim, args, c->dynamicSmemBytes);
}

// functions -------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = find_kernel(function);
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    const int limit = gpusim::shared_limit(config().architecture);
    const int fixed = static_cast<int>(kernel->program().dynamic_shared_offset);
    if (value + fixed > limit) {
      throw gpusim::Error(gpusim::text("kernel ", kernel->name, ": needs ", value + fixed,
                                       " bytes of shared memory, a block of sm_", config().architecture,
                                       " has at most ", limit));
    }
    if (value < 0) return result(cudaErrorInvalidValue);
    kernel->max_dynamic_shared = value;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  Kernel* kernel = find_kernel(function);
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  const gpusim::Program& program = kernel->program();
  std::memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = program.static_shared;
  attributes->localSizeBytes = program.local_bytes;
  attributes->maxThreadsPerBlock = program.max_threads;
  attributes->numRegs = std::min(program.register_count, 255);
  attributes->ptxVersion = attributes->binaryVersion = config().architecture;
  attributes->maxDynamicSharedSizeBytes = kernel->max_dynamic_shared;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                          std::size_t shared) {
  Kernel* kernel = find_kernel(function);
  if (!kernel) return result(cudaErrorInvalidDeviceFunction);
  const int shared_total = static_cast<int>(kernel->program().dynamic_shared_offset + shared) + 1024;
  *blocks =
      std::min({2048 / std::max(threads, 1), 32, (gpusim::shared_limit(config().architecture) + 1024) / shared_total});
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   std::size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

// device ----------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int architecture = config().architecture;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpusim::shared_limit(architecture); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = gpusim::shared_limit(architecture) + 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = config().multiprocessors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = architecture / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = architecture % 10; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "simulated GPU");
  const int limit = gpusim::shared_limit(config().architecture);
  p->major = config().architecture / 10;
  p->minor = config().architecture % 10;
  p->multiProcessorCount = config().multiprocessors;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = limit;
  p->sharedMemPerMultiprocessor = limit + 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->totalGlobalMem = std::size_t{80} << 30;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

// errors ----------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorMissingConfiguration: return "cudaErrorMissingConfiguration";
    case cudaErrorInvalidSymbol: return "cudaErrorInvalidSymbol";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument (for a launch: more dynamic shared memory than the kernel's attribute allows)";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDeviceFunction: return "this kernel is not in any loaded fat binary";
    case cudaErrorMissingConfiguration: return "a kernel was called without <<<>>>";
    case cudaErrorInvalidSymbol: return "this variable is not in any loaded fat binary";
    case cudaErrorNotSupported: return "the simulator does not offer this";
    default: return "unknown error";
  }
}

// memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  if (!*pointer) return result(cudaErrorMemoryAllocation);
  gpusim::register_memory(*pointer, bytes, "cudaMalloc");
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  gpusim::unregister_memory(pointer);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, std::size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return std::memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return std::memset(to, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  return std::memset(to, value, bytes), cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  *pointer = gpusim::find_variable(symbol);
  return result(*pointer ? cudaSuccess : cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, std::size_t bytes, std::size_t offset,
                               cudaMemcpyKind) {
  std::byte* to = gpusim::find_variable(symbol);
  if (!to) return result(cudaErrorInvalidSymbol);
  return std::memcpy(to + offset, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, std::size_t bytes, std::size_t offset, cudaMemcpyKind) {
  const std::byte* from = gpusim::find_variable(symbol);
  if (!from) return result(cudaErrorInvalidSymbol);
  return std::memcpy(to, from + offset, bytes), cudaSuccess;
}

// the driver's entry points -----------------------------------------------------------------------------------------

// The signature of cuTensorMapEncodeTiled; its enumerations are ints here. Returns a CUresult: 1 is invalid value.
static int encode_tensor_map(void* map, int type, unsigned rank, void* address, const std::uint64_t* dims,
                             const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps, int,
                             int swizzle, int, int) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (type < 0 || type > 12 || swizzle < 0 || swizzle > 3) return 1;
  return *gpusim::encode_tiled(map, bytes[type], rank, reinterpret_cast<std::uint64_t>(address), dims, strides, box,
                               steps, static_cast<gpusim::Swizzle>(swizzle)) != 0;
}

static cudaError_t entry_point(const char* symbol, void** pointer, cudaDriverEntryPointQueryResult* status) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *pointer = known ? reinterpret_cast<void*>(encode_tensor_map) : nullptr;
  if (status) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** pointer, unsigned long long,
                                    cudaDriverEntryPointQueryResult* status) {
  return entry_point(symbol, pointer, status);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** pointer, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  return entry_point(symbol, pointer, status);
}

// streams and events ------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = nullptr, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0, cudaSuccess;
}

}  // extern "C"
