#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/attention.h"

namespace mha_ext::cpu {
namespace {

std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      if (__builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16::kKernels);
      found.push_back(&avx512::kKernels);
    }
    found.push_back(&avx2::kKernels);
  }
#endif
  found.push_back(&portable::kKernels);
  return found;
}

const Kernels& named(const std::string& name, const char* source) {
  std::string known;
  for (const Kernels* each : supported()) {
    if (name == each->target) return *each;
    known += (known.empty() ? "" : ", ") + std::string(each->target);
  }
  throw std::invalid_argument(std::string(source) + ": expected one of " + known + ", which this machine runs, got '" +
                              name + "'");
}

const Kernels& by_default() {
  const char* name = std::getenv("MHA_EXT_CPU_TARGET");
  return name && *name ? named(name, "environment variable MHA_EXT_CPU_TARGET") : *supported().front();
}

std::atomic<const Kernels*> in_force{nullptr};

}  // namespace

std::vector<std::string> targets() {
  std::vector<std::string> names;
  for (const Kernels* each : supported()) names.emplace_back(each->target);
  return names;
}

const Kernels& kernels() {
  const Kernels* chosen = in_force.load(std::memory_order_relaxed);
  if (!chosen) in_force.store(chosen = &by_default(), std::memory_order_relaxed);
  return *chosen;
}

void use_target(const std::string& name) {
  in_force.store(name.empty() ? &by_default() : &named(name, "use_cpu_target"), std::memory_order_relaxed);
}

}  // namespace mha_ext::cpu
