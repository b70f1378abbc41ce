// What a launch did, in numbers.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "program.h"

namespace gpusim {

struct Counters {
  // of memory, counted while running
  std::uint64_t global_load_bytes = 0, global_store_bytes = 0;      // asked by the lanes
  std::uint64_t global_load_sectors = 0, global_store_sectors = 0;  // 32 bytes, distinct within one request
  std::uint64_t global_load_requests = 0, global_store_requests = 0;
  std::uint64_t shared_load_requests = 0, shared_store_requests = 0;
  std::uint64_t shared_load_wavefronts = 0, shared_store_wavefronts = 0;
  std::uint64_t shared_load_ideal = 0, shared_store_ideal = 0;  // wavefronts without bank conflicts
  std::uint64_t cp_async_bytes = 0, tma_bytes = 0;
  std::uint64_t barriers = 0;  // a warp at a barrier

  // from how often each operation ran
  std::array<std::uint64_t, static_cast<std::size_t>(Class::count)> by_class{};
  std::uint64_t warp_instructions = 0;
  std::uint64_t tensor_flops = 0;

  void add(const Counters& other);
};

struct LaunchRecord {
  std::string kernel;
  unsigned grid[3], block[3];
  std::uint32_t shared_bytes = 0;
  std::uint32_t local_bytes = 0;
  double seconds = 0;
  Counters counters;
};

const char* class_name(Class c);
std::string to_json(const LaunchRecord& record);

}  // namespace gpusim
