// What is known about every piece of shared memory: who wrote it last and when, who read it since, and whether an
// asynchronous copy is still on its way to it. Finds reads of memory never written, and races.
//
// Time is a counter of the block that grows with every synchronisation. A warp knows for every other warp up to which
// time its accesses are ordered before its own (a vector clock, on one common time line). An access to what another
// warp touched later than that is a race. Lanes of one warp are ordered by bar.warp and by the barriers of the block.
// Where only some lanes of a warp arrive or meet, the others are not ordered: what is known of those lanes alone stands
// beside the clock. Who waits, though, waits for its whole warp.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "warp.h"

namespace gpusim {

// A time for every warp, then one for every mbarrier that copies complete (an agent: what it wrote is known to those
// who wait for it, and to nobody else).
constexpr int kAgents = 32;
struct Clock {
  // Some lanes of a warp: what they did up to this time, later than what all lanes did.
  struct Part {
    int warp;
    Mask lanes;
    std::uint32_t time;
  };
  std::array<std::uint32_t, 32 + kAgents> times{};
  std::vector<Part> parts;

  std::uint32_t& operator[](std::size_t i) { return times[i]; }
  std::uint32_t operator[](std::size_t i) const { return times[i]; }
  void start(std::uint32_t time) { times.fill(time), parts.clear(); }
  void add(const Part& part);
  void join(const Clock& other);
};

struct Shadow {
  Shadow(const Block& block, std::uint32_t bytes, int granule_shift);
  ~Shadow();

  // A new block begins: nothing is written, nobody waits.
  void start();

  // Lanes m of the warp read or write `bytes` at offsets of shared memory. `collective`: the lanes act as one
  // (ldmatrix). `linear`: all lanes, side by side.
  void read(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective, bool linear);
  // Returns the lanes that overwrite what another thread wrote at the same time: harmless if the value stays the same.
  Mask write(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective, bool linear);
  void atomic(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);

  // A copy by cp.async is issued: its bytes may not be touched until its thread has waited for it.
  void write_async(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);
  // They are the thread's own writes from now on, or, with an agent, those of the agent.
  void arrived(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes);
  void arrived(const Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);
  void arrive_by(int agent) { arriving_ = agent; }  // -1: by the threads themselves
  int new_agent();

  // The edges: lanes of a warp meet; what a warp did so far goes into a clock; what is in a clock is known to a warp.
  void synchronize_lanes(const Warp& warp, Mask lanes);
  void release(const Warp& warp, Clock& into);
  void release(const Warp& warp, Mask lanes, Clock& into);
  // What an agent just wrote goes into a clock.
  void publish(int agent, Clock& into) { into[32 + agent] = now_++; }
  void acquire(const Warp& warp, const Clock& from);
  // All warps in `waiting` stand still at a barrier that completes: everything they did is before everything they will
  // do.
  void meet(Mask waiting, Clock& clock);

  // The asynchronous proxy: bulk copies and wgmma (shadow_async.cpp). An operation that reads shared memory is in
  // flight from begin_read, which gives it a number, to end_read by the lane that waited for it (kCollective: by the
  // warp).
  struct Bytes {
    std::uint32_t offset, bytes;  // multiples of 16
  };
  static constexpr int kWarp = 62;  // as a lane: all of them
  int begin_read(const Warp& warp, int lane, std::vector<Bytes> what);
  void end_read(int number, int lane);
  // fence.proxy.async by these lanes; and whether what is about to be overwritten is behind one.
  void fence_proxy(const Warp& warp, Mask m);
  void check_overwrite(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes) const;
  // The lane uses an mbarrier at this offset: its initialisation must be ordered before.
  void check_initialized(const Warp& warp, int lane, std::uint32_t offset) const;

  // For a lane that write() returned, and whose value differs.
  [[noreturn]] void refuse_write(const Warp& warp, int lane, std::uint32_t offset) const;

 private:
  // writer_: warp << 27, lane (or agent) << 22, whether it was an agent, and the operation
  static constexpr std::uint32_t kByAgent = 1u << 21, kPlace = kByAgent - 1;
  static constexpr std::uint32_t kInFlight = ~0u;  // written_: an asynchronous copy has not been waited for
  // read_: 7 bits beside the time: the lane, or that there were several, and whether all reads were synchronising ones
  static constexpr std::uint32_t kOrdered = 64, kManyLanes = 63, kReadBits = 7;
  struct Range {
    std::uint32_t first, last;
  };
  Range range(std::uint32_t offset, unsigned bytes) const { return {offset >> shift_, (offset + bytes - 1) >> shift_}; }
  std::uint32_t who(const Warp& warp, int lane) const;
  std::string story(std::uint32_t who) const;
  bool ordered(const Warp& warp, int lane, std::uint32_t granule) const;
  bool before(const Warp& warp, int lane, int other, int other_lane, std::uint32_t time) const;
  bool read_before(const Warp& warp, int lane, int other, std::uint32_t seen) const;
  bool is_synchronizing(std::uint32_t place) const;
  bool both_synchronizing(const Warp& warp, std::uint32_t granule) const;
  // What a whole instruction touches, looked at at once (shadow_whole.cpp); granule by granule when there may be
  // something to report.
  template <bool Collective, class G>
  void read_granules(Warp& warp, const G& granules);
  void record_read(int warp, std::uint32_t granule, std::uint32_t reader);
  template <class G>
  bool write_granules(const Warp& warp, const G& granules, std::uint32_t time);
  template <class G>
  void granules_arrived(const Warp& warp, const G& granules);
  template <class G>
  bool all_ordered(const Warp& warp, const G& granules, std::uint32_t least) const;
  Mask write_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective);
  void write_async_each(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);
  void check_read(Warp& warp, int lane, std::uint32_t granule);
  bool check_write(Warp& warp, int lane, std::uint32_t granule, bool collective);
  [[noreturn]] void race(int lane, const Warp& warp, const char* does, const char* other, std::uint32_t other_who,
                         std::uint32_t granule) const;

  const Block& block_;
  int shift_;
  std::uint32_t granules_;
  int warps_;
  std::uint32_t base_ = 0;  // time when the block began
  std::uint32_t now_ = 1;
  std::array<Clock, 32> known_{};          // known_[w][v]: accesses of v up to this time are ordered before w
  std::array<std::uint32_t, 32> floor_{};  // the least of known_[w]
  // Where lanes of a warp met without the others: known_lanes_[w][l][k], what lane l of warp w knows of lane k, and
  // when that was last.
  using Lanes = std::array<std::uint32_t, kLanes>;
  std::vector<std::array<Lanes, kLanes>> known_lanes_;
  std::array<std::uint32_t, 32> lanes_met_{};
  std::vector<std::uint32_t> written_;           // time of the last write of each granule
  std::vector<std::uint32_t> writer_;            // warp, lane and operation of it
  std::array<std::uint32_t, 32> overwritten_{};  // for each lane: whose write the last write() met
  std::vector<std::uint32_t> read_;  // for each warp and granule: its last read, as time << 7 | kOrdered | lane

  bool fenced(const Warp& warp, int lane, std::uint32_t granule) const;
  bool by_async_proxy(std::uint32_t who) const;
  void check_async_read(const Warp& warp, int lane, std::uint32_t granule) const;
  void check_no_reader(Mask m, const std::uint32_t* offsets, unsigned bytes) const;

  struct AsyncRead {
    const Warp* warp = nullptr;  // null: ended
    std::uint32_t who = 0;
    std::vector<Bytes> what;
  };
  struct Fence {
    std::uint32_t time;
    Mask lanes;
  };
  int agents_ = 0, next_agent_ = 0;  // in use; the next to be given away
  int arriving_ = -1;
  int reading_ = 0;                            // operations in flight that read
  std::vector<AsyncRead> async_reads_;         // by number
  std::vector<std::uint16_t> readers_;         // of each 16 bytes: operations in flight that read them
  std::array<std::vector<Fence>, 32> fences_;  // of each warp, in order
};

}  // namespace gpusim
