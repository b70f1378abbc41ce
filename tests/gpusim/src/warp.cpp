#include "warp.h"

#include <algorithm>

#include "block.h"
#include "lanes.h"

namespace gpusim {

namespace {
// After this many operations without meeting the others, a group of lanes lets another group run: lanes that spin
// on a value written by their own warp must not starve it.
constexpr std::uint64_t kFairness = 20000;
}  // namespace

std::uint64_t Warp::run(std::uint64_t budget) {
  std::uint64_t left = budget;
  yielded = false;
  if (state == State::blocked) {
    state = State::ready;
    parked = 0;
    pick();
  }
  std::uint64_t alone = 0;
  while (left > 0 && state == State::ready && !yielded) {
    // the inner loop runs one group of lanes
    const std::uint64_t turn = diverged() ? std::min(left, kFairness) : left;
    std::uint64_t n = 0;
    while (n < turn) {
      const Op& op = code[pc];
      ++executed[pc];
      ++pc;
      ++n;
      const Mask m = active & (pred(op.guard) ^ op.guard_flip);
      if (m != 0) op.run(*this, op, m);
      if (pc >= stop) break;
    }
    left -= n;
    if (state != State::ready) break;
    if (!diverged()) {
      stop = ~0u;
      continue;
    }
    alone = pc >= stop ? 0 : alone + n;
    for_each_lane(active, [&](int l) { lane_pc[l] = pc; });
    if (alone >= kFairness && (live & ~active & ~parked)) {
      const Mask tired = active;
      parked |= tired;
      pick();
      parked &= ~tired;
      alone = 0;
    } else {
      pick();
    }
  }
  return budget - left;
}

void Warp::pick() {
  const Mask candidates = live & ~parked;
  if (candidates == 0) {
    state = live == 0 ? State::done : State::blocked;
    blocked_at = block->events;
    stop = 0;  // leaves the inner loop of run()
    return;
  }
  std::uint32_t lowest = ~0u;
  for_each_lane(candidates, [&](int l) { lowest = std::min(lowest, lane_pc[l]); });
  active = 0;
  stop = ~0u;
  for_each_lane(live, [&](int l) {
    if (lane_pc[l] == lowest)
      active |= 1u << l;
    else if (lane_pc[l] > lowest)
      stop = std::min(stop, lane_pc[l]);
  });
  parked &= ~active;
  pc = lowest;
}

void Warp::branch(Mask taken, std::uint32_t target) {
  if (taken == active) {
    if (target < pc && diverged()) stop = 0;
    pc = target;
    return;
  }
  for_each_lane(active, [&](int l) { lane_pc[l] = (taken >> l & 1) ? target : pc; });
  pick();
}

void Warp::exit(Mask lanes) {
  live &= ~lanes;
  if (lanes == active) {
    parked = 0;  // whoever waited for these lanes looks again
    pick();
  } else {
    active &= ~lanes;
    block->notify();
  }
}

bool Warp::gather(Mask required) {
  if ((required & live & ~active) == 0) return true;
  --pc;
  --executed[pc];
  for_each_lane(active, [&](int l) { lane_pc[l] = pc; });
  parked |= active;
  waiting_for = "the other lanes of its warp";
  pick();
  return false;
}

void Warp::block_on(std::string reason) {
  --pc;
  --executed[pc];
  waiting_for = std::move(reason);
  for_each_lane(active, [&](int l) { lane_pc[l] = pc; });
  parked |= active;
  pick();
}

void Warp::wait_at_barrier(int id) {
  state = State::at_barrier;
  barrier = id;
  stop = 0;
}

}  // namespace gpusim
