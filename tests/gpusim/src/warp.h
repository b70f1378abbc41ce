// A warp: 32 lanes with one program counter each. The lanes that stand at the smallest program counter run together,
// so that lanes which parted meet again at the first instruction they share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fault.h"
#include "program.h"

namespace gpusim {

struct Block;

constexpr const char* kWaitsForMbarrier = "an mbarrier";

// A cp.async in flight: the lanes still to land, each with its place in the thread's sequence of groups.
struct PendingCopy {
  Mask lanes = 0;
  std::uint32_t bytes = 0;
  std::array<std::byte*, kLanes> to;
  std::array<const std::byte*, kLanes> from;
  std::array<std::uint8_t, kLanes> from_bytes;
  std::array<std::uint32_t, kLanes> group;
  bool landed = false;  // the bytes are there, but nobody may rely on it before the wait
};

// A bulk store that its thread has not waited for: it reads shared memory when it lands.
struct BulkStore {
  int lane;
  std::uint32_t group;
  int read;                    // the shadow's number of it
  std::function<void()> land;  // null: it has landed
};

struct Warp {
  enum class State : std::uint8_t { ready, blocked, at_barrier, done };

  std::byte* regs = nullptr;
  const Op* code = nullptr;
  Block* block = nullptr;
  std::uint64_t* executed = nullptr;  // how often each operation ran
  std::byte* local = nullptr;         // local memory of lane 0
  std::uint32_t local_stride = 0;
  int index = 0;

  State state = State::ready;
  Mask live = 0;    // lanes that have not exited
  Mask active = 0;  // lanes that run now, all at pc
  Mask parked = 0;  // lanes that wait for other lanes or for an event
  std::uint32_t pc = 0;
  std::uint32_t stop = ~0u;                     // the next program counter where another group of lanes stands
  std::array<std::uint32_t, kLanes> lane_pc{};  // of the lanes that are not active
  Mask carry = 0;                               // the CC flag
  Mask contested = 0;                           // lanes whose last store met another thread's
  bool yielded = false;
  int barrier = -1;              // named barrier this warp waits at
  std::string waiting_for;       // for the deadlock report
  std::uint64_t blocked_at = 0;  // the block's event count when it blocked

  std::vector<PendingCopy> copies;
  std::array<std::uint32_t, kLanes> copy_group{};
  std::vector<BulkStore> bulk_stores;
  std::array<std::uint32_t, kLanes> bulk_group{};
  std::uint32_t mbarrier = 0;  // that it waited for last
  int registers = 0;           // a thread has, where the kernel moves them (setmaxnreg)

  template <class T>
  T* reg(Slot slot) {
    return reinterpret_cast<T*>(regs + slot);
  }
  Mask& pred(Slot slot) { return *reinterpret_cast<Mask*>(regs + slot); }

  // Runs until the warp blocks, exits or `budget` operations ran. Returns how many ran.
  std::uint64_t run(std::uint64_t budget);

  void branch(Mask taken, std::uint32_t target);
  void exit(Mask lanes);

  // For instructions that need all of `required` (live lanes only) at this instruction: true if they are here.
  // Otherwise the present lanes wait for the others, the instruction will be tried again, and the handler must return.
  bool gather(Mask required);

  // The active lanes wait for an event outside the warp; the instruction will be tried again.
  void block_on(std::string reason);

  // The whole warp waits (at a barrier); goes on after this instruction when released.
  void wait_at_barrier(int id);

  // Lets other warps run soon.
  void yield() {
    yielded = true;
    stop = 0;
  }

  Mask diverged() const { return live & ~active; }

 private:
  void pick();
};

}  // namespace gpusim
