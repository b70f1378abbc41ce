// The simulator's side of csrc/api/device.h: operators are registered for CPU tensors, and every block of memory that
// torch allocates from now on is known to the simulator with its exact size.
#include "api/device.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace mha_ext::device {

c10::DispatchKey dispatch_key() { return c10::DispatchKey::CPU; }

cudaStream_t current_stream(const c10::Device&) { return nullptr; }

}  // namespace mha_ext::device

namespace {

c10::Allocator* inner = nullptr;

void release(void* pointer) {
  gpusim::unregister_memory(pointer);
  inner->raw_deleter()(pointer);
}

struct RegisteringAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr data = inner->allocate(bytes);
    if (data.get() == nullptr || data.get() != data.get_context()) return data;
    gpusim::register_memory(data.get(), bytes, "tensor");
    void* pointer = data.release_context();
    return {pointer, pointer, release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

const bool installed = [] {
  inner = c10::GetCPUAllocator();
  if (inner->raw_deleter() == nullptr) return false;
  static RegisteringAllocator allocator;
  c10::SetCPUAllocator(&allocator, 1);
  return true;
}();

}  // namespace
