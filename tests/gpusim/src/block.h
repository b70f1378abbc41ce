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
  Clock clock{};                 // what those who arrived did before
  const Warp* latest = nullptr;  // who arrived last, and where
  std::uint32_t pc = 0;
};

// The barrier of a cluster of one block: threads arrive, and later wait for the phase they arrived in.
struct ClusterBarrier {
  std::vector<Mask> arrived;       // in the current phase; a warp each
  std::vector<Mask> may_pass;      // arrived in a phase that is over, and have not waited for it
  Clock gathering{}, completed{};  // what those who arrived did before
};

struct Block {
  Block(Launch& launch, Counters& counters, std::uint64_t* executed);

  // Prepares for the block at this place of the grid; storage is reused.
  void start(std::uint64_t linear_index);

  // Runs about `budget` operations. True when the block has ended.
  bool run(std::uint64_t budget);

  // A warp arrives at a barrier; `threads` is 0 for the whole block. With `wait` the warp stops until all are there.
  void arrive(Warp& warp, int id, int threads, bool wait, Mask votes);

  // Ends the phase of the cluster barrier if every thread that has not exited has arrived.
  void complete_cluster();

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
  ClusterBarrier cluster;
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
  void ended();
  void check_limits();
  bool land();
  [[noreturn]] void deadlock();
  [[noreturn]] void rethrow(const Warp& warp, const Fault& fault, std::uint32_t pc);
  void fill_registers(Warp& warp);

  std::unique_ptr<std::byte[]> storage_;
  std::byte* regs_ = nullptr;
  std::byte* local_ = nullptr;
  std::uint64_t* executed_;
  std::uint64_t progress_ = 0, progress_at_ = 0;  // events and stores so far, and the step they last grew at
  std::uint64_t look_at_ = 0;                     // the step to look again
  std::uint64_t random_state_ = 0;
};

}  // namespace gpusim
