// The kernels of all fat binaries and PTX texts that were loaded, found by host function, handle or name.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "module.h"

namespace gpusim {

struct Binary {
  const void* wrapper = nullptr;  // fat binary, or null
  std::string ptx;                // text, or empty until first used
  std::unique_ptr<Module> module;
  std::mutex mutex;

  const Module& load();  // parses on first use
};

struct Kernel {
  Binary* binary = nullptr;
  std::string name;
  int max_dynamic_shared = 48 * 1024;

  const Program& program() const { return binary->load().kernel(name); }
};

Binary* add_fat_binary(const void* wrapper);
Binary* add_ptx(std::string text);
void remove_binary(Binary* binary);
void add_kernel(Binary* binary, const void* host_function, std::string name);
void add_variable(Binary* binary, const void* host_variable, std::string name);

// By the address of the host function or the handle itself; null when there is none.
Kernel* find_kernel(const void* function_or_handle);
std::byte* find_variable(const void* host_variable);

}  // namespace gpusim
