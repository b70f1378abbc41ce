// One kernel launch: the grid, its arguments, and the threads of the host that run its blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "counters.h"
#include "program.h"

namespace gpusim {

constexpr int kRegistersPerBlock = 65536, kMostRegisters = 255;  // of a thread

struct Launch {
  const Program* program = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  std::uint32_t dynamic_shared = 0;
  std::vector<std::byte> params;  // 64-byte aligned inside: see param_base
  const std::byte* param_base = nullptr;
  Config config;
  std::vector<std::byte> register_image;  // of one warp, constants filled in

  int threads_per_block() const { return static_cast<int>(block[0] * block[1] * block[2]); }
  std::uint64_t blocks() const { return std::uint64_t{grid[0]} * grid[1] * grid[2]; }
  std::uint32_t shared_total() const { return program->dynamic_shared_offset + dynamic_shared; }
  int registers_per_thread() const;  // when the kernel begins, by its directives; 0: they do not say
};

// Runs the launch to its end. Throws Error.
void run_launch(Launch& launch);

// The launches since the last clear, oldest first.
std::vector<LaunchRecord> launch_records();
void clear_launch_records();

}  // namespace gpusim
