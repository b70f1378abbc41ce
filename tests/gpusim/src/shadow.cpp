#include "shadow.h"

#include <algorithm>

#include "block.h"
#include "lanes.h"
#include "module.h"

namespace gpusim {

namespace {
constexpr std::uint32_t kInFlight = ~0u;  // written_: an asynchronous copy has not been waited for
constexpr std::uint32_t kManyLanes = 63, kCollective = 62;
constexpr std::uint32_t kLastTime = 1u << 25;  // times and lanes share a word

// whether an operation may meet another of its kind: atomics, volatile and ordered accesses
bool is_synchronizing(const Launch& launch, std::uint32_t pc) {
  return launch.program->code[pc].flags & kOpSynchronizing;
}
}  // namespace

Shadow::Shadow(const Block& block, std::uint32_t bytes, int granule_shift)
    : block_(block),
      shift_(granule_shift),
      granules_((bytes >> granule_shift) + 17),
      warps_(static_cast<int>(block.warps.size())),
      written_(granules_),
      writer_(granules_),
      read_(std::size_t{granules_} * warps_) {}

void Shadow::start() {
  if (now_ > kLastTime / 2) {
    std::fill(written_.begin(), written_.end(), 0);
    std::fill(read_.begin(), read_.end(), 0);
    now_ = 1;
  }
  for (std::uint32_t& time : written_) {  // copies nobody waited for
    if (time == kInFlight) time = 0;
  }
  base_ = ++now_;
  for (Clock& clock : known_) clock.fill(base_ - 1);
  floor_.fill(base_ - 1);
}

std::uint32_t Shadow::who(const Warp& warp, int lane) const {
  return static_cast<std::uint32_t>(warp.index) << 27 | static_cast<std::uint32_t>(lane) << 22 | (warp.pc - 1);
}

std::string Shadow::story(std::uint32_t who) const {
  const Program& program = *block_.launch.program;
  return text("warp ", who >> 27, ", lane ", who >> 22 & 31, " at ", program.module->place(program, who & 0x3fffff));
}

bool Shadow::ordered(const Warp& warp, int lane, std::uint32_t granule) const {
  const std::uint32_t who = writer_[granule];
  const auto writer = static_cast<int>(who >> 27);
  if (written_[granule] <= known_[warp.index][writer]) return true;
  return writer == warp.index && static_cast<int>(who >> 22 & 31) == lane;
}

bool Shadow::both_synchronizing(const Warp& warp, std::uint32_t granule) const {
  return is_synchronizing(block_.launch, warp.pc - 1) && is_synchronizing(block_.launch, writer_[granule] & 0x3fffff);
}

void Shadow::race(int lane, const Warp& warp, const char* does, const char* other, std::uint32_t other_who,
                  std::uint32_t granule) const {
  const bool same_warp = static_cast<int>(other_who >> 27) == warp.index;
  throw Fault{lane, text("race on shared memory, byte ", granule << shift_, ": ", does, " what ", story(other_who), " ",
                         other, ", without ", same_warp ? "__syncwarp" : "a barrier", " between")};
}

void Shadow::check_read(Warp& warp, int lane, std::uint32_t g) {
  const Checks& checks = block_.launch.config.checks;
  if (written_[g] == kInFlight) {
    if (checks.async_wait)
      throw Fault{lane, text("reads shared memory, byte ", g << shift_,
                             ", before the wait for the asynchronous copy by ", story(writer_[g]))};
    return;
  }
  if (written_[g] < base_) {
    if (checks.uninitialized) throw Fault{lane, text("reads shared memory that was never written, byte ", g << shift_)};
    return;
  }
  if (checks.races && !ordered(warp, lane, g) && !both_synchronizing(warp, g))
    race(lane, warp, "reads", "wrote", writer_[g], g);
}

void Shadow::read(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective) {
  switch (std::max(bytes >> shift_, 1u)) {
    case 1: return read_granules<1>(warp, m, offsets, collective);
    case 2: return read_granules<2>(warp, m, offsets, collective);
    case 4: return read_granules<4>(warp, m, offsets, collective);
    case 8: return read_granules<8>(warp, m, offsets, collective);
    default: return read_granules<16>(warp, m, offsets, collective);
  }
}

// Accesses are aligned, or were refused: a lane touches N whole granules.
template <int N>
void Shadow::read_granules(Warp& warp, Mask m, const std::uint32_t* offsets, bool collective) {
  std::uint32_t oldest = ~0u, newest = 0;
  for_each_lane(m, [&](int l) {
    const std::uint32_t* written = written_.data() + (offsets[l] >> shift_);
    for (int i = 0; i < N; ++i) {
      oldest = std::min(oldest, written[i]);
      newest = std::max(newest, written[i]);
    }
  });
  if (oldest < base_ || newest > floor_[warp.index]) {
    for_each_lane(m, [&](int l) {
      for (int i = 0; i < N; ++i) check_read(warp, l, (offsets[l] >> shift_) + i);
    });
  }
  std::uint32_t* const reads = read_.data() + std::size_t{granules_} * warp.index;
  const std::uint32_t time = now_ << 6;
  for_each_lane(m, [&](int l) {
    const std::uint32_t mine = time | (collective ? kCollective : static_cast<std::uint32_t>(l));
    std::uint32_t* r = reads + (offsets[l] >> shift_);
    for (int i = 0; i < N; ++i) r[i] = r[i] > time && r[i] != mine ? time | kManyLanes : mine;
  });
}

// True when another thread wrote this at the same time (the caller compares the values); other conflicts are refused.
bool Shadow::check_write(Warp& warp, int lane, std::uint32_t g, bool collective, bool async) {
  const Checks& checks = block_.launch.config.checks;
  if (written_[g] == kInFlight) {
    if (checks.async_wait)
      throw Fault{lane, text("writes shared memory, byte ", g << shift_,
                             ", before the wait for the asynchronous copy by ", story(writer_[g]))};
    return false;
  }
  if (!checks.races) return false;
  const bool synchronizing = is_synchronizing(block_.launch, warp.pc - 1);
  for (int v = 0; v < warps_; ++v) {
    const std::uint32_t seen = read_[std::size_t{granules_} * v + g];
    if (seen >> 6 <= known_[warp.index][v] || synchronizing) continue;
    const std::uint32_t reader = seen & 63;
    if (v == warp.index &&
        (collective || reader == kCollective || (reader == static_cast<std::uint32_t>(lane) && !async)))
      continue;
    if (v == warp.index && async && reader == static_cast<std::uint32_t>(lane)) continue;
    throw Fault{lane, text("race on shared memory, byte ", g << shift_, ": overwrites what warp ", v,
                           reader < 32 ? text(", lane ", reader) : std::string(), " read, without ",
                           v == warp.index ? "__syncwarp" : "a barrier", " between")};
  }
  return written_[g] >= base_ && !ordered(warp, lane, g) && !both_synchronizing(warp, g);
}

Mask Shadow::write(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective) {
  Mask contested = 0;
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    const std::uint32_t me = who(warp, l);
    for (std::uint32_t g = first; g <= last; ++g) {
      if (check_write(warp, l, g, collective, false)) {
        contested |= 1u << l;
        overwritten_[l] = writer_[g];
      }
      written_[g] = now_;
      writer_[g] = me;
    }
  });
  return contested;
}

void Shadow::atomic(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    for (std::uint32_t g = first; g <= last; ++g) {
      check_read(warp, l, g);
      check_write(warp, l, g, false, false);
      written_[g] = now_;
      writer_[g] = who(warp, l);
    }
  });
}

void Shadow::write_async(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    for (std::uint32_t g = first; g <= last; ++g) {
      if (check_write(warp, l, g, false, true)) race(l, warp, "overwrites", "wrote", writer_[g], g);
      written_[g] = kInFlight;
      writer_[g] = who(warp, l);
    }
  });
}

void Shadow::arrived(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes) {
  const auto [first, last] = range(offset, bytes);
  for (std::uint32_t g = first; g <= last; ++g) {
    if (written_[g] == kInFlight &&
        writer_[g] >> 22 == (static_cast<std::uint32_t>(warp.index) << 5 | static_cast<std::uint32_t>(lane)))
      written_[g] = now_;
  }
}

void Shadow::refuse_write(const Warp& warp, int lane, std::uint32_t offset) const {
  race(lane, warp, "writes another value over", "wrote", overwritten_[lane], offset >> shift_);
}

void Shadow::synchronize_lanes(const Warp& warp) { known_[warp.index][warp.index] = now_++; }

void Shadow::release(const Warp& warp, Clock& into) {
  known_[warp.index][warp.index] = now_++;
  for (int v = 0; v < warps_; ++v) into[v] = std::max(into[v], known_[warp.index][v]);
}

void Shadow::publish(const Warp& warp, Clock& into) { into[warp.index] = std::max(into[warp.index], now_++); }

void Shadow::meet(Mask waiting, Clock& clock) {
  for_each_lane(waiting, [&](int v) { clock[v] = now_; });
  ++now_;
}

void Shadow::acquire(const Warp& warp, const Clock& from) {
  Clock& mine = known_[warp.index];
  std::uint32_t least = ~0u;
  for (int v = 0; v < warps_; ++v) {
    mine[v] = std::max(mine[v], from[v]);
    least = std::min(least, mine[v]);
  }
  floor_[warp.index] = least;
}

}  // namespace gpusim
