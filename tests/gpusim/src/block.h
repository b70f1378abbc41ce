// A thread block: its warps, shared memory and barriers, and the order in which the warps run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "launch.h"
#include "mbarrier.h"
#include "shadow.h"
#include "warp.h"
#include "wgmma_registers.h"

namespace gpusim {

struct NamedBarrier {
  int expected = 0;  // threads; 0: nobody is here
  int arrived = 0;
  Mask waiting = 0;  // warps
  Mask arrived_warps = 0;
  std::uint32_t votes = 0;  // threads whose predicate holds (bar.red)
  std::uint32_t voters = 0;
  Clock clock{};  // what those who arrived did before
};

struct Block {
  Block(Launch& launch, Counters& counters, std::uint64_t* executed);

  // Prepares for the block at this place of the grid; storage is reused.
  void start(std::uint64_t linear_index);

  // Runs about `budget` operations. True when the block has ended.
  bool run(std::uint64_t budget);

  // A warp arrives at a barrier; `threads` is 0 for the whole block. With `wait` the warp stops until all are there.
  void arrive(Warp& warp, int id, int threads, bool wait, Mask votes);

  // Something happened that a blocked warp may wait for.
  void notify() { ++events; }

  // An asynchronous operation begins: it lands now or later, by the mode.
  void start_async(AsyncEvent event);
  // Lands the oldest operation in flight (in random mode: any). False when there is none.
  bool land_something();

  std::uint32_t random();

  Launch& launch;
  Counters& counters;
  std::uint64_t index = 0;
  unsigned ctaid[3] = {0, 0, 0};
  std::byte* shared = nullptr;
  std::uint32_t shared_bytes = 0;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::map<std::uint32_t, MBarrier> mbarriers;  // by shared address
  std::deque<AsyncEvent> in_flight;
  std::unique_ptr<Shadow> shadow;     // null when nothing asks for it
  std::vector<WarpgroupState> wgmma;  // of each warp; empty when nothing asks for it
  int free_registers = 0;             // given back by setmaxnreg.dec
  std::uint64_t events = 0;
  std::uint64_t steps = 0;

 private:
  void release(int id);
  void warp_ended(Warp& warp);
  bool land();
  [[noreturn]] void deadlock();
  [[noreturn]] void rethrow(const Warp& warp, const Fault& fault);
  void fill_registers(Warp& warp);

  std::unique_ptr<std::byte[]> storage_;
  std::byte* regs_ = nullptr;
  std::byte* local_ = nullptr;
  std::uint64_t* executed_;
  std::uint64_t random_state_ = 0;
};

}  // namespace gpusim
