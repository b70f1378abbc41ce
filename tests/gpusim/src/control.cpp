// What Python calls through ctypes: switches, registered memory, counters, and launching a kernel of a PTX text.
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#include "config.h"
#include "fault.h"
#include "launch.h"
#include "memory.h"
#include "registry.h"
#include "tensor_map.h"

#define GPUSIM_API extern "C" __attribute__((visibility("default")))

using namespace gpusim;

namespace {

thread_local std::string answer;  // keeps the last text alive

template <class F>
const char* text_or_error(F f) {  // "" when all is well, else the message
  answer.clear();
  try {
    f();
  } catch (const std::exception& error) {
    answer = error.what();
    if (answer.empty()) answer = "unknown error";
  }
  return answer.c_str();
}

// Every switch: how it is read, and how it is set.
template <auto Member>
struct Check {
  static long long get() { return config().checks.*Member; }
  static void set(long long value) { config().checks.*Member = value != 0; }
};
template <auto Member>
struct Setting {
  using Value = std::remove_reference_t<decltype(config().*Member)>;
  static long long get() { return static_cast<long long>(config().*Member); }
  static void set(long long value) { config().*Member = static_cast<Value>(value); }
};
struct Switch {
  long long (*get)();
  void (*set)(long long);
};
template <class S>
constexpr Switch make() {
  return {S::get, S::set};
}

const std::map<std::string, Switch>& switches() {
  static const std::map<std::string, Switch> all = {
      {"global_bounds", make<Check<&Checks::global_bounds>>()},
      {"alignment", make<Check<&Checks::alignment>>()},
      {"uninitialized", make<Check<&Checks::uninitialized>>()},
      {"races", make<Check<&Checks::races>>()},
      {"barriers", make<Check<&Checks::barriers>>()},
      {"async_wait", make<Check<&Checks::async_wait>>()},
      {"launch_bounds", make<Check<&Checks::launch_bounds>>()},
      {"wgmma_registers", make<Check<&Checks::wgmma_registers>>()},
      {"proxy_fences", make<Check<&Checks::proxy_fences>>()},
      {"cp_async_fence", make<Check<&Checks::cp_async_fence>>()},
      {"mbarrier_init_fence", make<Check<&Checks::mbarrier_init_fence>>()},
      {"arrival", make<Setting<&Config::arrival>>()},
      {"seed", make<Setting<&Config::seed>>()},
      {"architecture", make<Setting<&Config::architecture>>()},
      {"threads", make<Setting<&Config::threads>>()},
      {"multiprocessors", make<Setting<&Config::multiprocessors>>()},
      {"count_memory", make<Setting<&Config::count_memory>>()},
      {"step_limit", make<Setting<&Config::step_limit>>()},
      {"poll_limit", make<Setting<&Config::poll_limit>>()}};
  return all;
}

}  // namespace

// Sets a switch by name. Returns 0 when there is no such switch.
GPUSIM_API int gpusim_set(const char* name, long long value) {
  const auto found = switches().find(name);
  if (found == switches().end()) return 0;
  found->second.set(value);
  return 1;
}

GPUSIM_API long long gpusim_get(const char* name) {
  const auto found = switches().find(name);
  return found == switches().end() ? -1 : found->second.get();
}

GPUSIM_API void gpusim_register_memory(const void* start, std::size_t bytes) {
  register_memory(start, bytes, "registered");
}
GPUSIM_API void gpusim_unregister_memory(const void* start) { unregister_memory(start); }

// The records of the launches since the last call, as a JSON list.
GPUSIM_API const char* gpusim_take_records() {
  answer = "[";
  for (const LaunchRecord& record : launch_records()) answer += (answer.size() > 1 ? ",\n " : "") + to_json(record);
  answer += "]";
  clear_launch_records();
  return answer.c_str();
}

// A module from PTX text; null and gpusim_last_error() when it cannot be read.
GPUSIM_API void* gpusim_load_ptx(const char* ptx) {
  Binary* binary = add_ptx(ptx);
  text_or_error([&] { binary->load(); });
  return answer.empty() ? binary : nullptr;
}
GPUSIM_API const char* gpusim_last_error() { return answer.c_str(); }

// The sizes of the kernel's parameters, one byte offset and size pair each; returns their number, -1 on error.
GPUSIM_API int gpusim_parameters(void* module, const char* kernel, unsigned* sizes, int room) {
  int n = -1;
  text_or_error([&] {
    const Program& program = static_cast<Binary*>(module)->load().kernel(kernel);
    n = static_cast<int>(program.params.size());
    for (int i = 0; i < n && i < room; ++i) sizes[i] = program.params[i].bytes;
  });
  return n;
}

// args: one pointer to the value of each parameter. Returns "" or the error.
GPUSIM_API const char* gpusim_launch(void* module, const char* kernel, const unsigned* grid, const unsigned* block,
                                     unsigned shared, void** args) {
  return text_or_error([&] {
    Launch l;
    l.program = &static_cast<Binary*>(module)->load().kernel(kernel);
    l.config = config();
    std::copy(grid, grid + 3, l.grid);
    std::copy(block, block + 3, l.block);
    l.dynamic_shared = shared;
    l.params.resize(l.program->param_bytes + 128);
    const auto base = reinterpret_cast<std::uintptr_t>(l.params.data());
    std::byte* params = l.params.data() + ((base + 63) / 64 * 64 - base);
    l.param_base = params;
    for (std::size_t i = 0; i < l.program->params.size(); ++i) {
      std::memcpy(params + l.program->params[i].offset, args[i], l.program->params[i].bytes);
    }
    run_launch(l);
  });
}

// cuTensorMapEncodeTiled for Python; swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
GPUSIM_API const char* gpusim_encode_tiled(void* map, int element_bytes, unsigned rank, const void* address,
                                           const std::uint64_t* dims, const std::uint64_t* strides,
                                           const std::uint32_t* box, const std::uint32_t* steps, int swizzle) {
  return encode_tiled(map, element_bytes, rank, reinterpret_cast<std::uint64_t>(address), dims, strides, box, steps,
                      static_cast<Swizzle>(swizzle));
}
