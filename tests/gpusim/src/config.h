// Switches of the simulator. Read once when a launch starts.
#pragma once

#include <cstdint>

namespace gpusim {

// When an asynchronous copy is seen by the rest of the block.
enum class Arrival : std::uint8_t { late, at_once, random };

struct Checks {
  bool global_bounds = true;
  bool alignment = true;
  bool uninitialized = true;        // shared memory read before it was written
  bool races = true;                // shared memory, by vector clocks
  bool barriers = true;             // barriers that do not match, exited warps, mbarriers used against their rules
  bool async_wait = true;           // results used, or operands overwritten, before the wait
  bool launch_bounds = true;        // more threads than a kernel without bounds has registers for
  bool wgmma_registers = true;      // accumulators touched before their wait, or without wgmma.fence
  bool proxy_fences = true;         // between stores and the asynchronous proxy
  bool cp_async_fence = true;       // between cp.async, which is generic too, and the asynchronous proxy
  bool mbarrier_init_fence = true;  // between mbarrier.init and a bulk copy that completes the barrier
};

struct Config {
  Checks checks;
  Arrival arrival = Arrival::late;
  std::uint64_t seed = 0;  // 0: warps take turns; else a random order with preemption
  int architecture = 90;
  int threads = 1;
  int multiprocessors = 132;
  bool count_memory = true;  // sectors and wavefronts
  // Warp instructions a block may execute, and may execute while nothing stores or completes anything: then it only
  // polls. 0: no limit.
  std::uint64_t step_limit = 1ull << 33, poll_limit = 1ull << 25;
};

Config& config();

// The largest shared memory a block may ask for, in bytes.
inline int shared_limit(int architecture) {
  switch (architecture) {
    case 75: return 65536;
    case 80:
    case 87: return 166912;
    case 86:
    case 89:
    case 120:
    case 121: return 101376;
    default: return 232448;
  }
}

}  // namespace gpusim
