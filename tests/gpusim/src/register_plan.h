// Which virtual registers may share a slot. PTX names every value anew, thousands in an unrolled kernel: with a slot
// each, the registers of a few warps would not fit into the host's caches.
//
// A kernel is decoded twice. The first time notes who touches what; from that come the ranges of operations where each
// register is alive, and slots for them; the second time uses those slots.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "program.h"

namespace gpusim {

struct RegisterLog {
  struct Touch {
    std::uint32_t op, id;
    bool written;
  };
  std::vector<int> widths;     // of every register, in the order of decoding: its place here is its id
  std::vector<Touch> touches;  // in the order of the operations
  std::vector<bool> alone;     // of a wgmma, which goes on using it where nothing else says so
  std::vector<std::pair<std::uint32_t, std::uint32_t>> copies;  // mov of one register to another
};

struct RegisterPlan {
  std::vector<Slot> slots;  // by id
  Slot end = 0;             // the first slot after them
};

RegisterPlan plan_registers(const Program& program, const RegisterLog& log, Slot begin);

}  // namespace gpusim
