// The shadow's view of an instruction as a whole. Nearly always there is nothing to report, and that can be seen by a
// few comparisons over all granules the warp touches; else they are judged one by one, by the rules in shadow.cpp.
#include <algorithm>
#include <cstring>

#include "block.h"
#include "lanes.h"
#include "shadow.h"

namespace gpusim {

namespace {

constexpr std::uint32_t kCollective = Shadow::kWarp;

// Neighbouring granules, handled together: a vector, or one word.
template <int N>
struct Words {
  using type __attribute__((vector_size(4 * N))) = std::uint32_t;
};
template <>
struct Words<1> {
  using type = std::uint32_t;
};

template <class V>
[[gnu::always_inline]] inline V load(const std::uint32_t* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
[[gnu::always_inline]] inline void store(std::uint32_t* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
template <class V>
[[gnu::always_inline]] inline V splat(std::uint32_t x) {
  return V{} + x;
}
template <class V, class F>
[[gnu::always_inline]] inline std::uint32_t reduce(V v, F f) {
  if constexpr (sizeof v == 4) {
    return v;
  } else {
    std::uint32_t result = v[0];
    for (std::size_t i = 1; i < sizeof v / 4; ++i) result = f(result, v[i]);
    return result;
  }
}

// N granules a lane, beginning at `first`. Accesses are aligned, or were refused: granules are touched whole.
template <int N>
struct Scattered {
  static constexpr int together = std::min(N, 8);
  using V = typename Words<together>::type;
  Mask m;
  std::array<std::uint32_t, kLanes> first;

  Scattered(Mask mask, const std::uint32_t* offsets, int shift) : m(mask) {
    for (int l = 0; l < kLanes; ++l) first[l] = offsets[l] >> shift;
  }
  // f(place in the row, the lanes that touch what begins there)
  template <class F>
  [[gnu::always_inline]] void each(F f) const {
    for_each_lane(m, [&](int l) {
      for (int i = 0; i < N; i += together) f(first[l] + i, splat<V>(static_cast<std::uint32_t>(l)));
    });
  }
};

// All lanes, side by side.
template <int N>
struct Linear {
  using V = typename Words<8>::type;
  std::uint32_t first;

  Linear(const std::uint32_t* offsets, int shift) : first(offsets[0] >> shift) {}
  template <class F>
  [[gnu::always_inline]] void each(F f) const {
    static constexpr auto lanes = [] {
      std::array<std::uint32_t, kLanes * N> a{};
      for (std::uint32_t i = 0; i < a.size(); ++i) a[i] = i / N;
      return a;
    }();
    for (std::uint32_t i = 0; i < lanes.size(); i += 8) f(first + i, load<V>(&lanes[i]));
  }
};

// The largest number of a row.
template <class G>
[[gnu::always_inline]] inline std::uint32_t newest(const G& granules, const std::uint32_t* row) {
  using V = typename G::V;
  V most{};
  granules.each([&](std::uint32_t g, V) {
    const V v = load<V>(row + g);
    most = most > v ? most : v;
  });
  return reduce(most, [](std::uint32_t a, std::uint32_t b) { return std::max(a, b); });
}

// Calls f with the granules of an access; false if its size is none of the usual ones.
template <class F>
bool with_granules(Mask m, const std::uint32_t* offsets, unsigned bytes, int shift, bool linear, F f) {
  const auto as = [&]<int N>() {
    if (linear)
      f(Linear<N>(offsets, shift));
    else
      f(Scattered<N>(m, offsets, shift));
    return true;
  };
  switch (std::max(bytes >> shift, 1u)) {
    case 1: return as.template operator()<1>();
    case 2: return as.template operator()<2>();
    case 4: return as.template operator()<4>();
    case 8: return as.template operator()<8>();
    case 16: return as.template operator()<16>();
    case 32: return as.template operator()<32>();
    default: return false;
  }
}

}  // namespace

// Everything was written at the time `least` or later, and is ordered before what the warp does now.
template <class G>
bool Shadow::all_ordered(const Warp& warp, const G& granules, std::uint32_t least) const {
  using V = typename G::V;
  const std::uint32_t* const known = known_[warp.index].times.data();
  const std::uint32_t *const writer = writer_.data(), *const written = written_.data();
  bool all = true;
  granules.each([&](std::uint32_t first, V) {
    for (std::uint32_t g = first; g < first + sizeof(V) / 4; ++g) {
      const std::uint32_t who = writer[g];
      const std::uint32_t by = who & kByAgent ? 32 + (who >> 22 & 31) : who >> 27;
      all &= written[g] >= least && written[g] <= known[by];
    }
  });
  return all;
}

template <bool Collective, class G>
void Shadow::read_granules(Warp& warp, const G& granules) {
  using V = typename G::V;
  const std::uint32_t* const written = written_.data();
  V least = ~V{}, most{};
  granules.each([&](std::uint32_t g, V) {
    const V v = load<V>(written + g);
    least = least < v ? least : v;
    most = most > v ? most : v;
  });
  const std::uint32_t oldest = reduce(least, [](std::uint32_t a, std::uint32_t b) { return std::min(a, b); });
  const std::uint32_t latest = reduce(most, [](std::uint32_t a, std::uint32_t b) { return std::max(a, b); });
  if ((oldest < base_ || latest > floor_[warp.index]) && !all_ordered(warp, granules, base_)) {
    granules.each([&](std::uint32_t first, V lanes) {
      std::uint32_t lane[sizeof(V) / 4];
      std::memcpy(lane, &lanes, sizeof lanes);
      for (std::uint32_t i = 0; i < sizeof(V) / 4; ++i) check_read(warp, static_cast<int>(lane[i]), first + i);
    });
  }
  std::uint32_t* const reads = read_.data() + std::size_t{granules_} * warp.index;
  if (is_synchronizing(warp.pc - 1)) {
    granules.each([&](std::uint32_t first, V lanes) {
      std::uint32_t lane[sizeof(V) / 4];
      std::memcpy(lane, &lanes, sizeof lanes);
      for (std::uint32_t i = 0; i < sizeof(V) / 4; ++i) record_read(warp.index, first + i, lane[i] | kOrdered);
    });
    return;
  }
  // as record_read: an earlier read counts as long as nothing ordered it before what the warp does now
  const std::uint32_t time = now_ << kReadBits;
  const V now = splat<V>(time), many = splat<V>(time | kManyLanes);
  const V open = splat<V>((known_[warp.index][warp.index] + 1) << kReadBits);
  granules.each([&](std::uint32_t g, V lanes) {
    const V reader = Collective ? splat<V>(kCollective) : lanes, seen = load<V>(reads + g), before = seen & 63;
    const auto several = (seen >= open) & (before != reader) & (before != kCollective);
    store(reads + g, static_cast<V>(several ? many : static_cast<V>(now | reader)));
  });
}

// A lane reads what another lane of its warp read, unordered: several did. After lanes that read as one, the lane alone
// is what others must wait for.
void Shadow::record_read(int warp, std::uint32_t granule, std::uint32_t reader) {
  std::uint32_t& seen = read_[std::size_t{granules_} * warp + granule];
  if (seen >> kReadBits > known_[warp][warp]) {
    const std::uint32_t before = seen & 63;
    if (before != (reader & 63) && before != kCollective) reader |= kManyLanes;
    if (!(seen & kOrdered)) reader &= ~kOrdered;
  }
  seen = now_ << kReadBits | reader;
}

void Shadow::read(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective, bool linear) {
  with_granules(m, offsets, bytes, shift_, linear, [&](const auto& granules) {
    if (collective)
      read_granules<true>(warp, granules);
    else
      read_granules<false>(warp, granules);
  });
}

// True if the lanes write where all that was done before is ordered before them, and no two at the same place.
template <class G>
bool Shadow::write_granules(const Warp& warp, const G& granules, std::uint32_t time) {
  using V = typename G::V;
  if (newest(granules, written_.data()) > floor_[warp.index] && !all_ordered(warp, granules, 0)) return false;
  for (int v = 0; v < warps_; ++v) {
    if (newest(granules, read_.data() + std::size_t{granules_} * v) >> kReadBits > known_[warp.index][v]) return false;
  }
  const V me = splat<V>(who(warp, 0));
  std::uint32_t* const writer = writer_.data();
  std::uint32_t* const written = written_.data();
  granules.each([&](std::uint32_t g, V lanes) { store(writer + g, static_cast<V>(me | lanes << 22)); });
  V other{};  // whoever wrote last is the writer: did another lane overwrite that?
  granules.each([&](std::uint32_t g, V lanes) { other |= load<V>(writer + g) ^ (me | lanes << 22); });
  if (reduce(other, [](std::uint32_t a, std::uint32_t b) { return a | b; }))
    return false;  // an ordered writer is nobody
  granules.each([&](std::uint32_t g, V) { store(written + g, splat<V>(time)); });
  return true;
}

Mask Shadow::write(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes, bool collective, bool linear) {
  if (reading_) check_no_reader(m, offsets, bytes);
  bool done = false;
  const auto usual = [&](const auto& granules) { done = write_granules(warp, granules, now_); };
  with_granules(m, offsets, bytes, shift_, linear, usual);
  return done ? 0 : write_each(warp, m, offsets, bytes, collective);
}

void Shadow::write_async(Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
  if (reading_) check_no_reader(m, offsets, bytes);
  bool done = false;
  const auto usual = [&](const auto& granules) { done = write_granules(warp, granules, kInFlight); };
  with_granules(m, offsets, bytes, shift_, false, usual);
  if (!done) write_async_each(warp, m, offsets, bytes);
}

template <class G>
void Shadow::granules_arrived(const Warp& warp, const G& granules) {
  using V = typename G::V;
  const V me = splat<V>(static_cast<std::uint32_t>(warp.index) << 5), now = splat<V>(now_);
  const std::uint32_t* const writer = writer_.data();
  std::uint32_t* const written = written_.data();
  granules.each([&](std::uint32_t g, V lanes) {
    const V time = load<V>(written + g);
    store(written + g, static_cast<V>((time == kInFlight) & (load<V>(writer + g) >> 22 == (me | lanes)) ? now : time));
  });
}

void Shadow::arrived(const Warp& warp, Mask m, const std::uint32_t* offsets, unsigned bytes) {
  const auto usual = [&](const auto& granules) { granules_arrived(warp, granules); };
  if (arriving_ < 0 && with_granules(m, offsets, bytes, shift_, false, usual)) return;
  for_each_lane(m, [&](int l) { arrived(warp, l, offsets[l], bytes); });
}

}  // namespace gpusim
