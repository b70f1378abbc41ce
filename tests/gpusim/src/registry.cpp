#include "registry.h"

#include <map>

#include "fatbin.h"

namespace gpusim {

namespace {

struct Tables {
  std::mutex mutex;
  std::vector<std::unique_ptr<Binary>> binaries;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::map<const void*, Kernel*> by_function;
  std::map<const void*, std::pair<Binary*, std::string>> variables;
};

Tables& tables() {
  static Tables* instance = new Tables;  // static constructors of other files register before ours would run
  return *instance;
}

Binary* add(std::unique_ptr<Binary> binary) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  t.binaries.push_back(std::move(binary));
  return t.binaries.back().get();
}

}  // namespace

const Module& Binary::load() {
  const std::lock_guard lock(mutex);
  if (!module) module = std::make_unique<Module>(ptx.empty() ? ptx_of_fat_binary(wrapper) : ptx);
  return *module;
}

Binary* add_fat_binary(const void* wrapper) {
  auto binary = std::make_unique<Binary>();
  binary->wrapper = wrapper;
  return add(std::move(binary));
}

Binary* add_ptx(std::string text) {
  auto binary = std::make_unique<Binary>();
  binary->ptx = std::move(text);
  return add(std::move(binary));
}

void remove_binary(Binary* binary) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  std::erase_if(t.by_function, [&](const auto& entry) { return entry.second->binary == binary; });
  std::erase_if(t.variables, [&](const auto& entry) { return entry.second.first == binary; });
}

void add_kernel(Binary* binary, const void* host_function, std::string name) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  t.kernels.push_back(std::make_unique<Kernel>());
  Kernel* kernel = t.kernels.back().get();
  kernel->binary = binary;
  kernel->name = std::move(name);
  t.by_function[host_function ? host_function : kernel] = kernel;
  t.by_function[kernel] = kernel;
}

void add_variable(Binary* binary, const void* host_variable, std::string name) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  t.variables[host_variable] = {binary, std::move(name)};
}

Kernel* find_kernel(const void* key) {
  Tables& t = tables();
  const std::lock_guard lock(t.mutex);
  const auto found = t.by_function.find(key);
  return found == t.by_function.end() ? nullptr : found->second;
}

std::byte* find_variable(const void* host_variable) {
  Tables& t = tables();
  std::pair<Binary*, std::string> entry;
  {
    const std::lock_guard lock(t.mutex);
    const auto found = t.variables.find(host_variable);
    if (found == t.variables.end()) return nullptr;
    entry = found->second;
  }
  return entry.first->load().address_of(entry.second);
}

}  // namespace gpusim
