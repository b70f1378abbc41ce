// What is known about every piece of shared memory: who wrote it last and when, who read it since, and whether an
// asynchronous copy is still on its way to it. Finds reads of memory never written, and races.
//
// Time is a counter of the block that grows with every synchronisation. A warp knows for every other warp up to which
// time its accesses are ordered before its own (a vector clock, on one common time line). An access to what another
// warp touched later than that is a race. Lanes of one warp are ordered by bar.warp and by the barriers of the block.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "warp.h"

namespace gpusim {

using Clock = std::array<std::uint32_t, 32>;  // a time for every warp

struct Shadow {
  Shadow(const Block& block, std::uint32_t bytes, int granule_shift);

  // A new block begins: nothing is written, nobody waits.
  void start();

  // Lanes m of the warp read or write `bytes` at offsets of shared memory. `collective`: the lanes act as one
  // (ldmatrix).
  void read(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective);
  // Returns the lanes that overwrite what another thread wrote at the same time: harmless if the value stays the same.
  Mask write(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective);
  void atomic(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);

  // A copy by cp.async is issued: its bytes may not be touched until its thread has waited for it.
  void write_async(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes);
  void arrived(const Warp& warp, int lane, std::uint32_t offset, unsigned bytes);

  // The edges: lanes of a warp meet; what a warp did so far goes into a clock; what is in a clock is known to a warp.
  void synchronize_lanes(const Warp& warp);
  void release(const Warp& warp, Clock& into);
  // What an asynchronous operation of the warp just wrote goes into a clock.
  void publish(const Warp& warp, Clock& into);
  void acquire(const Warp& warp, const Clock& from);
  // All warps in `waiting` stand still at a barrier that completes: everything they did is before everything they will
  // do.
  void meet(Mask waiting, Clock& clock);

  // For a lane that write() returned, and whose value differs.
  [[noreturn]] void refuse_write(const Warp& warp, int lane, std::uint32_t offset) const;

 private:
  struct Range {
    std::uint32_t first, last;
  };
  Range range(std::uint32_t offset, unsigned bytes) const { return {offset >> shift_, (offset + bytes - 1) >> shift_}; }
  std::uint32_t who(const Warp& warp, int lane) const;
  std::string story(std::uint32_t who) const;
  bool ordered(const Warp& warp, int lane, std::uint32_t granule) const;
  bool both_synchronizing(const Warp& warp, std::uint32_t granule) const;
  template <int N>
  void read_granules(Warp& warp, Mask m, const std::uint32_t* offsets, bool collective);
  void check_read(Warp& warp, int lane, std::uint32_t granule);
  bool check_write(Warp& warp, int lane, std::uint32_t granule, bool collective, bool async);
  [[noreturn]] void race(int lane, const Warp& warp, const char* does, const char* other, std::uint32_t other_who,
                         std::uint32_t granule) const;

  const Block& block_;
  int shift_;
  std::uint32_t granules_;
  int warps_;
  std::uint32_t base_ = 0;  // time when the block began
  std::uint32_t now_ = 1;
  std::array<Clock, 32> known_{};                // known_[w][v]: accesses of v up to this time are ordered before w
  std::array<std::uint32_t, 32> floor_{};        // the least of known_[w]
  std::vector<std::uint32_t> written_;           // time of the last write of each granule
  std::vector<std::uint32_t> writer_;            // warp, lane and operation of it
  std::array<std::uint32_t, 32> overwritten_{};  // for each lane: whose write the last write() met
  std::vector<std::uint32_t> read_;              // for each warp and granule: time << 6 | lane of its last read
};

}  // namespace gpusim
