// mbarrier objects, and the asynchronous operations that complete them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shadow.h"

namespace gpusim {

// Bytes that a bulk copy wrote: nobody may touch them before a wait for the phase they belong to.
struct Landed {
  const Warp* warp;
  int lane;
  std::uint32_t offset, bytes;
  std::uint32_t pc;  // of the copy
};

struct MBarrier {
  bool valid = true;                     // false: mbarrier.inval ended it
  int init_warp = 0, init_lane = 0;      // who initialised it, and
  bool init_fenced = false;              // whether that thread has made it known to the asynchronous proxy
  int agent = -1;                        // the shadow's name for what copies write on its behalf
  std::uint32_t count = 0;               // arrivals a phase needs
  std::uint32_t pending = 0;             // arrivals the current phase still needs
  std::int64_t bytes = 0;                // announced and not yet arrived
  std::uint64_t phase = 0;               // completed phases
  std::vector<Landed> landed, complete;  // in the current phase; in phases nobody has waited for yet
  Clock gathering{}, completed{};        // what arrivals of the current and of the last phase did before
};

// An operation in flight that the block lands when it must, or likes to.
struct AsyncEvent {
  std::function<void()> land;
  const char* what = "";
  bool must_be_waited_for = false;  // before the block ends
  const Warp* warp = nullptr;       // who issued it, and where
  int lane = -1;
  std::uint32_t pc = 0;
};

}  // namespace gpusim
