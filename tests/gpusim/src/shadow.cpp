#include "shadow.h"

#include <algorithm>

#include "block.h"
#include "lanes.h"
#include "module.h"

namespace gpusim {

namespace {
constexpr std::uint32_t kCollective = Shadow::kWarp;
constexpr std::uint32_t kLastTime = 1u << 25;  // times and lanes share a word

// The rows of a shadow that is gone, for the next: clearing them would take as long as a small launch. Times go on.
struct Rows {
  std::uint32_t now = 1;
  std::vector<std::uint32_t> written, writer, read;
};
thread_local std::vector<Rows> spare_rows;
}  // namespace

Shadow::Shadow(const Block& block, std::uint32_t bytes, int granule_shift)
    : block_(block),
      shift_(granule_shift),
      granules_((bytes >> granule_shift) + 17),
      warps_(static_cast<int>(block.warps.size())),
      readers_(block.launch.program->async_proxy ? bytes / 16 + 1 : 0) {
  if (!spare_rows.empty()) {
    now_ = spare_rows.back().now;
    written_ = std::move(spare_rows.back().written);
    writer_ = std::move(spare_rows.back().writer);
    read_ = std::move(spare_rows.back().read);
    spare_rows.pop_back();
  }
  written_.resize(granules_);
  writer_.resize(granules_);
  read_.resize(std::size_t{granules_} * warps_);
}

Shadow::~Shadow() { spare_rows.push_back({now_, std::move(written_), std::move(writer_), std::move(read_)}); }

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
  for (Clock& clock : known_) clock.start(base_ - 1);
  lanes_met_.fill(0);
  known_lanes_.clear();
  floor_.fill(base_ - 1);
  agents_ = next_agent_ = 0;
  if (readers_.empty()) return;
  reading_ = 0;
  async_reads_.clear();
  std::fill(readers_.begin(), readers_.end(), 0);
  for (std::vector<Fence>& fences : fences_) fences.clear();
}

std::uint32_t Shadow::who(const Warp& warp, int lane) const {
  return static_cast<std::uint32_t>(warp.index) << 27 | static_cast<std::uint32_t>(lane) << 22 | (warp.pc - 1);
}

std::string Shadow::story(std::uint32_t who) const {
  const Program& program = *block_.launch.program;
  return text("warp ", who >> 27, who & kByAgent ? std::string() : text(", lane ", who >> 22 & 31), " at ",
              program.module->place(program, who & kPlace));
}

bool Shadow::ordered(const Warp& warp, int lane, std::uint32_t granule) const {
  const std::uint32_t who = writer_[granule];
  if (who & kByAgent) return written_[granule] <= known_[warp.index][32 + (who >> 22 & 31)];
  return before(warp, lane, static_cast<int>(who >> 27), static_cast<int>(who >> 22 & 31), written_[granule]);
}

// What another thread did at that time is before what the lane does now.
bool Shadow::before(const Warp& warp, int lane, int other, int other_lane, std::uint32_t time) const {
  const Clock& known = known_[warp.index];
  if (time <= known[other]) return true;
  if (other == warp.index) {
    if (other_lane == lane) return true;
    if (lanes_met_[other] > known[other] && time <= known_lanes_[other][lane][other_lane]) return true;
  }
  return std::any_of(known.parts.begin(), known.parts.end(), [&](const Clock::Part& p) {
    return p.warp == other && (p.lanes >> other_lane & 1) && time <= p.time;
  });
}

// The same of a read. Of several lanes that read nobody knows which: any two that handed over will do, and one other of
// the own warp. Lanes that read as one did so before any of them goes on.
bool Shadow::read_before(const Warp& warp, int lane, int other, std::uint32_t seen) const {
  const std::uint32_t time = seen >> kReadBits, reader = seen & 63;
  const Clock& known = known_[warp.index];
  if (time <= known[other]) return true;
  const bool own = other == warp.index;
  if (reader == kCollective && own) return true;
  if (reader < 32) return before(warp, lane, other, static_cast<int>(reader), time);
  Mask lanes = 0;
  std::uint32_t latest = 0;
  for (const Clock::Part& p : known.parts) {
    if (p.warp == other) lanes |= p.lanes, latest = std::max(latest, p.time);
  }
  if (reader == kCollective) return time <= latest;
  if (!own) return time <= latest && (lanes & (lanes - 1));
  if (lanes_met_[other] > known[other]) {
    for (int k = 0; k < kLanes; ++k) lanes |= static_cast<Mask>(known_lanes_[other][lane][k] > known[other]) << k;
  }
  return lanes & ~(1u << lane);
}

// Whether an operation may meet another of its kind: atomics, volatile and ordered accesses.
bool Shadow::is_synchronizing(std::uint32_t place) const {
  return block_.launch.program->code[place].flags & kOpSynchronizing;
}

bool Shadow::both_synchronizing(const Warp& warp, std::uint32_t granule) const {
  return is_synchronizing(warp.pc - 1) && is_synchronizing(writer_[granule] & kPlace);
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

// True when another thread wrote this at the same time (the caller compares the values); other conflicts are refused.
bool Shadow::check_write(Warp& warp, int lane, std::uint32_t g, bool collective) {
  const Checks& checks = block_.launch.config.checks;
  if (written_[g] == kInFlight) {
    if (checks.async_wait)
      throw Fault{lane, text("writes shared memory, byte ", g << shift_,
                             ", before the wait for the asynchronous copy by ", story(writer_[g]))};
    return false;
  }
  if (!checks.races) return false;
  const bool synchronizing = is_synchronizing(warp.pc - 1);
  for (int v = 0; v < warps_; ++v) {
    const std::uint32_t seen = read_[std::size_t{granules_} * v + g];
    if (seen >> kReadBits <= known_[warp.index][v] || (synchronizing && (seen & kOrdered))) continue;
    if ((v == warp.index && collective) || read_before(warp, lane, v, seen)) continue;
    const std::uint32_t reader = seen & 63;
    throw Fault{lane, text("race on shared memory, byte ", g << shift_, ": overwrites what warp ", v,
                           reader < 32 ? text(", lane ", reader) : std::string(), " read, without ",
                           v == warp.index ? "__syncwarp" : "a barrier", " between")};
  }
  if (written_[g] < base_ || ordered(warp, lane, g) || both_synchronizing(warp, g)) return false;
  if (!(writer_[g] & kByAgent) && block_.launch.program->info[writer_[g] & kPlace].kind == Class::atomic)
    race(lane, warp, "overwrites", "updated", writer_[g], g);  // whatever the value: the update may come last
  return true;
}

Mask Shadow::write_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective) {
  Mask contested = 0;
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    const std::uint32_t me = who(warp, l);
    for (std::uint32_t g = first; g <= last; ++g) {
      if (check_write(warp, l, g, collective)) {
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
  if (reading_) check_no_reader(m, offsets, bytes);
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    for (std::uint32_t g = first; g <= last; ++g) {
      check_read(warp, l, g);
      check_write(warp, l, g, false);
      written_[g] = now_;
      writer_[g] = who(warp, l);
    }
  });
}

void Shadow::write_async_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
  for_each_lane(m, [&](int l) {
    const auto [first, last] = range(offsets[l], bytes);
    for (std::uint32_t g = first; g <= last; ++g) {
      if (check_write(warp, l, g, false)) race(l, warp, "overwrites", "wrote", writer_[g], g);
      written_[g] = kInFlight;
      writer_[g] = who(warp, l);
    }
  });
}

void Shadow::arrived(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes) {
  const auto [first, last] = range(offset, bytes);
  for (std::uint32_t g = first; g <= last; ++g) {
    if (written_[g] == kInFlight &&
        writer_[g] >> 22 == (static_cast<std::uint32_t>(warp.index) << 5 | static_cast<std::uint32_t>(lane))) {
      written_[g] = now_;
      if (arriving_ >= 0)
        writer_[g] = (writer_[g] & ~(31u << 22)) | static_cast<std::uint32_t>(arriving_) << 22 | kByAgent;
    }
  }
}

void Shadow::refuse_write(const Warp& warp, int lane, std::uint32_t offset) const {
  race(lane, warp, "writes another value over", "wrote", overwritten_[lane], offset >> shift_);
}

void Clock::add(const Part& part) {
  if (part.time <= times[part.warp]) return;
  for (Part& p : parts) {
    if (p.warp != part.warp || p.lanes != part.lanes) continue;
    p.time = std::max(p.time, part.time);
    return;
  }
  parts.push_back(part);
}

void Clock::join(const Clock& other) {
  for (std::size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], other.times[i]);
  for (const Part& p : other.parts) add(p);
  std::erase_if(parts, [&](const Part& p) { return p.time <= times[p.warp]; });
}

void Shadow::synchronize_lanes(const Warp& warp, Mask lanes) {
  const std::uint32_t now = now_++;
  if (lanes == warp.live) {
    known_[warp.index][warp.index] = now;
    return;
  }
  if (known_lanes_.empty()) known_lanes_.resize(warps_);
  lanes_met_[warp.index] = now;
  std::array<Lanes, kLanes>& known = known_lanes_[warp.index];
  Lanes all{};
  for_each_lane(lanes, [&](int l) {
    for (int k = 0; k < kLanes; ++k) all[k] = std::max(all[k], known[l][k]);
  });
  for_each_lane(lanes, [&](int l) { all[l] = now; });
  for_each_lane(lanes, [&](int l) { known[l] = all; });
}

void Shadow::release(const Warp& warp, Clock& into) {
  into.join(known_[warp.index]);
  into[warp.index] = now_++;
}

// Lanes that arrive hand over what they did and what they know, not what other lanes of their warp did. When all have,
// that is the warp.
void Shadow::release(const Warp& warp, Mask lanes, Clock& into) {
  if (lanes == warp.live) return release(warp, into);
  const int w = warp.index;
  const Clock& known = known_[w];
  into.join(known);
  into.add({w, lanes, now_++});
  if (lanes_met_[w] > known[w]) {
    for_each_lane(lanes, [&](int l) {
      for (int k = 0; k < kLanes; ++k) into.add({w, 1u << k, known_lanes_[w][l][k]});
    });
  }
  Lanes latest{};
  for (const Clock::Part& p : into.parts) {
    if (p.warp == w) for_each_lane(p.lanes, [&](int l) { latest[l] = std::max(latest[l], p.time); });
  }
  std::uint32_t least = ~0u;
  for_each_lane(warp.live, [&](int l) { least = std::min(least, latest[l]); });
  into[w] = std::max(into[w], least);
}

void Shadow::meet(Mask waiting, Clock& clock) {
  for_each_lane(waiting, [&](int v) { clock[v] = now_; });
  ++now_;
}

void Shadow::acquire(const Warp& warp, const Clock& from) {
  Clock& mine = known_[warp.index];
  mine.join(from);
  std::uint32_t least = ~0u;
  for (int v = 0; v < warps_; ++v) least = std::min(least, mine[v]);
  for (int v = 32; v < 32 + agents_; ++v) least = std::min(least, mine[v]);
  floor_[warp.index] = least;
}

}  // namespace gpusim
