#include "access.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "block.h"
#include "lanes.h"
#include "memory.h"

namespace gpusim {

namespace {

const char* verb(AccessKind kind) {
  switch (kind) {
    case AccessKind::read: return "read";
    case AccessKind::write: return "write";
    case AccessKind::atomic: return "atomic access";
    case AccessKind::async_write:
    case AccessKind::bulk_write: return "asynchronous write";
    case AccessKind::async_read: return "asynchronous read";
    case AccessKind::matrix_read: return "matrix read";
    case AccessKind::matrix_write: return "matrix write";
  }
  return "";
}

bool is_load(AccessKind kind) { return kind == AccessKind::read || kind == AccessKind::matrix_read; }

void check_alignment(Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind) {
  const std::uint64_t low = std::clamp(bytes, 1u, 16u) - 1;
  std::uint64_t any = 0;
  if (m == kAllLanes) {
    for (int l = 0; l < kLanes; ++l) any |= addresses[l];
  } else {
    for_each_lane(m, [&](int l) { any |= addresses[l]; });
  }
  if ((any & low) == 0) return;
  for_each_lane(m, [&](int l) {
    if (addresses[l] & low)
      throw Fault{l, text("misaligned ", verb(kind), " of ", bytes, " bytes at ", hex(addresses[l]))};
  });
}

// All lanes, side by side
template <class A>
bool consecutive(Mask m, const A& addresses, unsigned bytes) {
  if (m != kAllLanes) return false;
  using T = std::remove_cvref_t<decltype(addresses[0])>;
  T different = 0;
  for (int l = 0; l < kLanes; ++l) different |= addresses[l] ^ (addresses[0] + static_cast<T>(l) * bytes);
  return different == 0;
}

// How many sectors the lanes touch, if each touches one and none goes back; else 0.
int sectors_in_order(Mask m, const Addresses& addresses, unsigned bytes) {
  if (m != kAllLanes || bytes > 32) return 0;
  std::uint64_t split = (addresses[0] ^ (addresses[0] + bytes - 1)) >> 5;
  int steps = 0, backward = 0;
  for (int l = 1; l < kLanes; ++l) {
    const std::uint64_t before = addresses[l - 1] >> 5, sector = addresses[l] >> 5;
    split |= sector ^ ((addresses[l] + bytes - 1) >> 5);
    steps += sector != before;
    backward |= sector < before;
  }
  return split == 0 && !backward ? steps + 1 : 0;
}

void count_global(Block& block, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind, bool linear) {
  // Distinct 32-byte sectors in the order of the lanes; sorted only when the order is not monotonic.
  std::array<std::uint64_t, kLanes * 2> sectors;
  int n = 0;
  bool sorted = true;
  if (linear)
    n = static_cast<int>((addresses[31] + bytes - 1) / 32 - addresses[0] / 32 + 1);
  else if (const int sectors_touched = sectors_in_order(m, addresses, bytes))
    n = sectors_touched;
  else
    for_each_lane(m, [&](int l) {
      for (std::uint64_t s = addresses[l] / 32; s <= (addresses[l] + bytes - 1) / 32 && n < kLanes * 2; ++s) {
        if (n > 0 && sectors[n - 1] == s) continue;
        if (n > 0 && sectors[n - 1] > s) sorted = false;
        sectors[n++] = s;
      }
    });
  if (!sorted) {
    std::sort(sectors.begin(), sectors.begin() + n);
    n = static_cast<int>(std::unique(sectors.begin(), sectors.begin() + n) - sectors.begin());
  }
  const std::uint64_t asked = std::uint64_t{bytes} * __builtin_popcount(m);
  Counters& c = block.counters;
  if (is_load(kind)) {
    c.global_load_bytes += asked;
    c.global_load_sectors += n;
    ++c.global_load_requests;
  } else {
    c.global_store_bytes += asked;
    c.global_store_sectors += n;
    ++c.global_store_requests;
  }
}

bool global_pointers(Warp& warp, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind, Pointers& out) {
  const Config& config = warp.block->launch.config;
  if (config.checks.global_bounds) {
    std::uint64_t low = ~0ull, high = 0;
    if (m == kAllLanes) {
      low = *std::min_element(addresses.begin(), addresses.end());
      high = *std::max_element(addresses.begin(), addresses.end());
    } else {
      for_each_lane(m, [&](int l) {
        low = std::min(low, addresses[l]);
        high = std::max(high, addresses[l]);
      });
    }
    if (high - low > (1ull << 40) || !memory_allowed(low, high - low + bytes)) {
      for_each_lane(m, [&](int l) {
        if (!memory_allowed(addresses[l], bytes)) {
          throw Fault{l, text("global ", verb(kind), " of ", bytes, " bytes out of bounds: ", hex(addresses[l]), " is ",
                              describe_memory(addresses[l]))};
        }
      });
    }
  }
  const bool linear = consecutive(m, addresses, bytes);
  if (config.count_memory) count_global(*warp.block, m, addresses, bytes, kind, linear);
  for (int l = 0; l < kLanes; ++l) out[l] = reinterpret_cast<std::byte*>(addresses[l]);
  return linear;
}

// Whether no two lanes need the same banks, unless for the same words of them.
bool without_conflict(Mask phase, const std::uint32_t* offsets, unsigned bytes) {
  if (bytes > 16) return false;
  const int width = bytes <= 4 ? 2 : bytes == 8 ? 3 : 4;  // of the piece that a lane takes, as a power of 2
  std::array<std::uint32_t, 32> piece_in_banks;
  std::uint32_t used = 0, different = 0;
  for_each_lane(phase, [&](int l) {
    const std::uint32_t at = offsets[l] + kSharedBase, piece = at >> width, banks = piece & ((128u >> width) - 1);
    const std::uint32_t there = used >> banks & 1 ? piece_in_banks[banks] : piece;
    different |= (there ^ piece) | (((at + bytes - 1) >> width) ^ piece);
    piece_in_banks[banks] = piece;
    used |= 1u << banks;
  });
  return different == 0;
}

// As many as the fullest bank has different words.
int phase_wavefronts(Mask phase, const std::uint32_t* offsets, unsigned bytes) {
  if (without_conflict(phase, offsets, bytes)) return 1;
  std::array<std::uint32_t, kLanes> word_in_bank;
  std::uint32_t used = 0;
  std::array<std::uint32_t, kLanes * 4> more;  // words that met another word in their bank
  int n = 0;
  for_each_lane(phase, [&](int l) {
    const std::uint32_t first_word = (offsets[l] + kSharedBase) / 4,
                        last_word = (offsets[l] + kSharedBase + bytes - 1) / 4;
    for (std::uint32_t w = first_word; w <= last_word; ++w) {
      const std::uint32_t bank = w % 32;
      if (!(used >> bank & 1))
        word_in_bank[bank] = w;
      else if (word_in_bank[bank] != w)
        more[n++] = w;
      used |= 1u << bank;
    }
  });
  int fullest = 1;
  if (n > 0) {
    std::sort(more.begin(), more.begin() + n);
    n = static_cast<int>(std::unique(more.begin(), more.begin() + n) - more.begin());
    std::array<int, 32> count;
    count.fill(1);
    for (int i = 0; i < n; ++i) fullest = std::max(fullest, ++count[more[i] % 32]);
  }
  return fullest;
}

// Shared memory has 32 banks of 4 bytes. A request of up to 4 bytes a lane goes in one phase; of 8 bytes, half a warp
// at a time; of 16 bytes (and ldmatrix), a quarter. A phase takes one wavefront or more.
void count_shared(Block& block, Mask m, const std::uint32_t* offsets, unsigned bytes, AccessKind kind, bool linear) {
  if (kind == AccessKind::atomic || kind == AccessKind::bulk_write || kind == AccessKind::async_read) return;
  const int lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  std::uint64_t wavefronts = 0, ideal = 0;
  const bool usual = bytes == 4 || bytes == 8 || bytes == 16;
  // Which banks each lane takes, in units of what it takes: a phase that takes all of them has no conflict.
  std::array<std::uint32_t, kLanes> taken;
  if (usual && !linear) {
    const auto width = static_cast<std::uint32_t>(std::countr_zero(bytes)), units = 128u >> width;
    std::uint32_t misaligned = 0;
    for (int l = 0; l < kLanes; ++l) {
      taken[l] = 1u << (offsets[l] >> width & (units - 1));
      misaligned |= offsets[l] & (bytes - 1);
    }
    if (misaligned) taken.fill(0);
  }
  for (int first = 0; first < kLanes; first += lanes) {
    const Mask whole = lanes == 32 ? kAllLanes : ((1u << lanes) - 1) << first, phase = m & whole;
    if (!phase) continue;
    ++ideal;
    bool once = usual && linear;
    if (usual && !linear && phase == whole) {
      std::uint32_t all = 0;
      for (int l = first; l < first + lanes; ++l) all |= taken[l];
      once = all == whole >> first;
    }
    wavefronts += once ? 1 : phase_wavefronts(phase, offsets, bytes);
  }
  Counters& c = block.counters;
  if (is_load(kind)) {
    ++c.shared_load_requests;
    c.shared_load_wavefronts += wavefronts;
    c.shared_load_ideal += ideal;
  } else {
    ++c.shared_store_requests;
    c.shared_store_wavefronts += wavefronts;
    c.shared_store_ideal += ideal;
  }
}

bool shared_pointers(Warp& warp, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind, Pointers& out) {
  Block& block = *warp.block;
  const std::uint32_t size = block.shared_bytes;
  std::array<std::uint32_t, kLanes> offsets;
  for (int l = 0; l < kLanes; ++l) offsets[l] = static_cast<std::uint32_t>(addresses[l]) - kSharedBase;
  std::uint32_t worst = 0;
  if (m == kAllLanes) {
    for (int l = 0; l < kLanes; ++l) worst = std::max(worst, offsets[l]);
  } else {
    for_each_lane(m, [&](int l) { worst = std::max(worst, offsets[l]); });
  }
  // always checked: a wild pointer into the host's memory helps nobody
  if (std::uint64_t{worst} + bytes > size) {
    for_each_lane(m, [&](int l) {
      if (std::uint64_t{offsets[l]} + bytes <= size) return;
      throw Fault{l, text("shared ", verb(kind), " of ", bytes, " bytes out of bounds: byte ",
                          static_cast<std::int32_t>(offsets[l]), " of ", size)};
    });
  }
  for (int l = 0; l < kLanes; ++l) out[l] = block.shared + offsets[l];
  const bool linear = consecutive(m, offsets, bytes);
  if (block.launch.config.count_memory) count_shared(block, m, offsets.data(), bytes, kind, linear);
  if (!block.shadow) return linear;
  Shadow& shadow = *block.shadow;
  switch (kind) {
    case AccessKind::read: shadow.read(warp, m, offsets.data(), bytes, false, linear); break;
    case AccessKind::matrix_read: shadow.read(warp, m, offsets.data(), bytes, true, linear); break;
    case AccessKind::async_read: break;  // the operation tells the shadow: see Shadow::begin_read
    case AccessKind::atomic: shadow.atomic(warp, m, offsets.data(), bytes); break;
    case AccessKind::async_write:
    case AccessKind::bulk_write: shadow.write_async(warp, m, offsets.data(), bytes); break;
    case AccessKind::write:
    case AccessKind::matrix_write:
      warp.contested = shadow.write(warp, m, offsets.data(), bytes, kind == AccessKind::matrix_write, linear);
  }
  return linear;
}

void local_pointers(Warp& warp, Mask m, const Addresses& addresses, unsigned bytes, Pointers& out) {
  for_each_lane(m, [&](int l) {
    const std::uint64_t offset = static_cast<std::uint32_t>(addresses[l]);
    if (offset + bytes > warp.local_stride) {
      throw Fault{l, text("local access of ", bytes, " bytes out of bounds: byte ", offset, " of ", warp.local_stride)};
    }
    out[l] = warp.local + std::size_t{warp.local_stride} * l + offset;
  });
}

bool generic_pointers(Warp& warp, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind, Pointers& out) {
  Mask in_shared = 0, in_local = 0;
  for_each_lane(m, [&](int l) {
    const std::uint64_t window = addresses[l] >> 32 << 32;
    if (window == kSharedWindow) in_shared |= 1u << l;
    if (window == kLocalWindow) in_local |= 1u << l;
  });
  const Mask in_global = m & ~in_shared & ~in_local;
  if (in_global == m) return global_pointers(warp, m, addresses, bytes, kind, out);
  if (in_shared == m) return shared_pointers(warp, m, addresses, bytes, kind, out);
  if (in_global) global_pointers(warp, in_global, addresses, bytes, kind, out);
  Pointers other;
  if (in_shared) {
    shared_pointers(warp, in_shared, addresses, bytes, kind, other);
    for_each_lane(in_shared, [&](int l) { out[l] = other[l]; });
  }
  if (in_local) {
    local_pointers(warp, in_local, addresses, bytes, other);
    for_each_lane(in_local, [&](int l) { out[l] = other[l]; });
  }
  return false;
}

}  // namespace

void compute_addresses(Warp& warp, Slot slot, bool wide, std::int64_t offset, Addresses& out) {
  if (wide) {
    const auto* base = warp.reg<std::uint64_t>(slot);
    for (int l = 0; l < kLanes; ++l) out[l] = base[l] + static_cast<std::uint64_t>(offset);
  } else {
    const auto* base = warp.reg<std::uint32_t>(slot);
    const auto small = static_cast<std::uint32_t>(offset);
    for (int l = 0; l < kLanes; ++l) out[l] = base[l] + small;
  }
}

bool resolve(Warp& warp, Space space, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind,
             Pointers& out) {
  warp.contested = 0;
  if (warp.block->launch.config.checks.alignment) check_alignment(m, addresses, bytes, kind);
  switch (space) {
    case Space::global:
    case Space::constant: return global_pointers(warp, m, addresses, bytes, kind, out);
    case Space::shared: return shared_pointers(warp, m, addresses, bytes, kind, out);
    case Space::local: local_pointers(warp, m, addresses, bytes, out); return false;
    case Space::generic: return generic_pointers(warp, m, addresses, bytes, kind, out);
    case Space::param:
      for (int l = 0; l < kLanes; ++l) out[l] = reinterpret_cast<std::byte*>(addresses[l]);
      return false;
  }
  return false;
}

void count_partial_read(Block& block, Mask m, const Addresses& addresses, const std::uint8_t* bytes, Mask counted) {
  std::vector<std::uint64_t> sectors;
  const auto distinct = [&](Mask lanes) {
    for_each_lane(lanes, [&](int l) {
      for (std::uint64_t s = addresses[l] / 32; s * 32 < addresses[l] + bytes[l]; ++s) sectors.push_back(s);
    });
    std::sort(sectors.begin(), sectors.end());
    sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
    return sectors.size();
  };
  const std::size_t before = distinct(counted);
  Counters& c = block.counters;
  c.global_load_sectors += distinct(m) - before;
  for_each_lane(m & ~counted, [&](int l) { c.global_load_bytes += bytes[l]; });
  if (!counted) ++c.global_load_requests;
}

std::byte* resolve_one(Warp& warp, int lane, Space space, std::uint64_t address, unsigned bytes, AccessKind kind) {
  Addresses addresses{};
  Pointers out{};
  addresses[lane] = address;
  resolve(warp, space, 1u << lane, addresses, bytes, kind, out);
  return out[lane];
}

}  // namespace gpusim
