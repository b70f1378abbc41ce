#include "shadow.h"

#include <algorithm>

#include "block.h"
#include "lanes.h"
#include "module.h"

namespace gpusim {

namespace {
constexpr std::uint32_t kCollective = Shadow::kWarp;
constexpr std::uint32_t kLastTime = 1u << 25;  // times and lanes share a word

// whether an operation may meet another of its kind: atomics, volatile and ordered accesses
bool is_synchronizing(const Launch& launch, std::uint32_t pc) {
  return launch.program->code[pc].flags & kOpSynchronizing;
}

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
  for (Clock& clock : known_) clock.fill(base_ - 1);
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
  const auto writer = static_cast<int>(who >> 27);
  if (written_[granule] <= known_[warp.index][writer]) return true;
  return writer == warp.index && static_cast<int>(who >> 22 & 31) == lane;
}

bool Shadow::both_synchronizing(const Warp& warp, std::uint32_t granule) const {
  return is_synchronizing(block_.launch, warp.pc - 1) && is_synchronizing(block_.launch, writer_[granule] & kPlace);
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

Mask Shadow::write_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective) {
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
  if (reading_) check_no_reader(m, offsets, bytes);
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

void Shadow::write_async_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
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

void Shadow::synchronize_lanes(const Warp& warp) { known_[warp.index][warp.index] = now_++; }

void Shadow::release(const Warp& warp, Clock& into) {
  known_[warp.index][warp.index] = now_++;
  for (int v = 0; v < warps_; ++v) into[v] = std::max(into[v], known_[warp.index][v]);
  for (int v = 32; v < 32 + agents_; ++v) into[v] = std::max(into[v], known_[warp.index][v]);
}

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
  for (int v = 32; v < 32 + agents_; ++v) {
    mine[v] = std::max(mine[v], from[v]);
    least = std::min(least, mine[v]);
  }
  floor_[warp.index] = least;
}

}  // namespace gpusim
