// The shadow's view of the asynchronous proxy: bulk copies and wgmma read and write shared memory beside the threads.
// What threads wrote is seen there after fence.proxy.async by the thread that wrote, before it hands over. What is
// being read may not change until the wait. What was written there is seen by threads after their wait, without a
// fence.
#include <algorithm>

#include "block.h"
#include "lanes.h"
#include "shadow.h"

namespace gpusim {

bool Shadow::by_async_proxy(std::uint32_t who) const {
  return block_.launch.program->code[who & kPlace].flags & kOpAsyncProxy;
}

void Shadow::fence_proxy(const Warp& warp, Mask m) { fences_[warp.index].push_back({now_++, m}); }

// The thread that wrote this has executed a proxy fence since, and that is before what the lane does now. Copies that
// an mbarrier completed have no thread that could: they pass.
bool Shadow::fenced(const Warp& warp, int lane, std::uint32_t g) const {
  const std::uint32_t who = writer_[g];
  if (written_[g] < base_ || (who & kByAgent) || by_async_proxy(who)) return true;
  const Checks& checks = block_.launch.config.checks;
  const bool copy = block_.launch.program->info[who & kPlace].kind == Class::async_copy;
  if (!(copy ? checks.cp_async_fence : checks.proxy_fences)) return true;
  const auto writer = static_cast<int>(who >> 27), writer_lane = static_cast<int>(who >> 22 & 31);
  const std::vector<Fence>& fences = fences_[writer];
  auto fence = std::lower_bound(fences.begin(), fences.end(), written_[g],
                                [](const Fence& f, std::uint32_t time) { return f.time < time; });
  while (fence != fences.end() && !(fence->lanes >> writer_lane & 1)) ++fence;
  if (fence == fences.end()) return false;
  return (writer == warp.index && lane == kWarp) ||
         before(warp, lane == kWarp ? 0 : lane, writer, writer_lane, fence->time);
}

void Shadow::check_async_read(const Warp& warp, int lane, std::uint32_t g) const {
  const Checks& checks = block_.launch.config.checks;
  const int first = lane == kWarp ? 0 : lane;
  if (written_[g] == kInFlight) {
    if (checks.async_wait)
      throw Fault{first, text("reads shared memory, byte ", g << shift_,
                              ", before the wait for the asynchronous copy by ", story(writer_[g]))};
    return;
  }
  if (written_[g] < base_) {
    if (checks.uninitialized)
      throw Fault{first, text("reads shared memory that was never written, byte ", g << shift_)};
    return;
  }
  if (checks.races && !ordered(warp, first, g)) race(first, warp, "reads", "wrote", writer_[g], g);
  if (!fenced(warp, lane, g))
    throw Fault{first, text("the asynchronous proxy reads shared memory, byte ", g << shift_, ", that ",
                            story(writer_[g]), " wrote, without fence.proxy.async by that thread between")};
}

int Shadow::begin_read(const Warp& warp, int lane, std::vector<Bytes> what) {
  for (const Bytes& piece : what) {
    // neighbours that the same instruction wrote at the same time are alike
    std::uint32_t time = 0, who = 0;
    const auto [first, last] = range(piece.offset, piece.bytes);
    for (std::uint32_t g = first; g <= last; ++g) {
      if (written_[g] == time && writer_[g] == who && time >= base_) continue;
      check_async_read(warp, lane, g);
      time = written_[g], who = writer_[g];
    }
    for (std::uint32_t at = piece.offset / 16; at < (piece.offset + piece.bytes) / 16; ++at) ++readers_[at];
  }
  std::size_t number = 0;
  if (reading_ < static_cast<int>(async_reads_.size()))
    while (async_reads_[number].warp) ++number;
  else
    number = async_reads_.size();
  if (number == async_reads_.size()) async_reads_.emplace_back();
  async_reads_[number] = {&warp, who(warp, lane == kWarp ? 0 : lane), std::move(what)};
  ++reading_;
  return static_cast<int>(number);
}

// From here on it is a read like any other: ordered by what the lane does next.
void Shadow::end_read(int number, int lane) {
  AsyncRead& read = async_reads_[number];
  for (const Bytes& piece : read.what) {
    const auto [first, last] = range(piece.offset, piece.bytes);
    for (std::uint32_t g = first; g <= last; ++g) record_read(read.warp->index, g, static_cast<std::uint32_t>(lane));
    for (std::uint32_t at = piece.offset / 16; at < (piece.offset + piece.bytes) / 16; ++at) --readers_[at];
  }
  read.warp = nullptr;
  --reading_;
}

void Shadow::check_no_reader(Mask m, const std::uint32_t* offsets, unsigned bytes) const {
  if (!block_.launch.config.checks.async_wait) return;
  for_each_lane(m, [&](int l) {
    for (std::uint32_t at = offsets[l] / 16; at <= (offsets[l] + bytes - 1) / 16; ++at) {
      if (!readers_[at]) continue;
      for (const AsyncRead& read : async_reads_) {
        if (!read.warp) continue;
        for (const Bytes& piece : read.what) {
          if (at * 16 < piece.offset || at * 16 >= piece.offset + piece.bytes) continue;
          throw Fault{l, text("overwrites shared memory, byte ", std::max(at * 16, offsets[l]), ", that ",
                              story(read.who), " may still read: its wait has not come yet")};
        }
      }
    }
  });
}

void Shadow::check_overwrite(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes) const {
  if (offset + bytes > block_.shared_bytes) return;  // refused elsewhere
  const auto [first, last] = range(offset, bytes);
  for (std::uint32_t g = first; g <= last; ++g) {
    if (written_[g] == kInFlight || fenced(warp, lane, g)) continue;
    throw Fault{lane, text("the asynchronous proxy overwrites shared memory, byte ", g << shift_, ", that ",
                           story(writer_[g]), " wrote, without fence.proxy.async by that thread between")};
  }
}

void Shadow::check_initialized(const Warp& warp, int lane, std::uint32_t offset) const {
  const std::uint32_t g = offset >> shift_;
  if (!block_.launch.config.checks.races || written_[g] == kInFlight || written_[g] < base_) return;
  if (!ordered(warp, lane, g)) race(lane, warp, "uses the mbarrier", "initialised", writer_[g], g);
}

int Shadow::new_agent() {
  const int agent = next_agent_++ % kAgents;
  agents_ = std::max(agents_, agent + 1);
  return agent;
}

}  // namespace gpusim
