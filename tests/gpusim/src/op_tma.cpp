// cp.async.bulk: copies of any size, and of tiles described by a tensor map, by an engine of their own. Loads report to
// an mbarrier; stores are waited for by groups.
#include <algorithm>
#include <cstring>

#include "access.h"
#include "async.h"
#include "block.h"
#include "handlers.h"
#include "memory.h"
#include "tensor_map.h"

namespace gpusim {

namespace {

enum Form : std::uint16_t { kLoad, kStore, kReduceAdd };

// One bulk operation, its operands read when it is issued.
struct Bulk {
  Warp* warp;
  int lane;
  std::uint32_t shared;  // address
  std::uint64_t global;  // address, or of the tensor map
  std::uint32_t bytes;
  TensorMap map;
  std::int32_t coordinates[5];
  Type type;
};

// Calls f(global address or 0 when outside, offset in the tile, bytes) for every element of the tile.
template <class F>
void for_tile(const Bulk& b, F f) {
  const TensorMap& m = b.map;
  std::uint32_t index[5] = {}, offset = 0;
  for (;;) {
    bool inside = true;
    std::uint64_t address = m.address;
    for (int i = 0; i < m.rank; ++i) {
      const std::int64_t at = std::int64_t{b.coordinates[i]} + std::int64_t{index[i]} * m.steps[i];
      inside &= at >= 0 && at <= m.dims[i];
      address += static_cast<std::uint64_t>(at) * (i ? m.strides[i - 1] : m.element_bytes);
    }
    f(inside ? address : 0, offset, m.element_bytes);
    offset += m.element_bytes;
    int i = 0;
    while (i < m.rank && ++index[i] == m.box[i]) index[i++] = 0;
    if (i == m.rank) return;
  }
}

void check_global(const Bulk& b, std::uint64_t address, unsigned bytes) {
  if (!b.warp->block->launch.config.checks.global_bounds || memory_allowed(address, bytes)) return;
  throw Fault{b.lane,
              text("bulk copy of ", bytes, " bytes out of bounds: ", hex(address), " is ", describe_memory(address))};
}

std::byte* shared_byte(const Bulk& b, std::uint32_t offset) {
  return b.warp->block->shared + (swizzled(b.shared + offset, b.map.swizzle) - kSharedBase);
}

void add_float(std::byte* to, const std::byte* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i += 4) {
    float x, y;
    std::memcpy(&x, to + i, 4);
    std::memcpy(&y, from + i, 4);
    x += y;
    std::memcpy(to + i, &x, 4);
  }
}

template <std::uint16_t What>
void move(const Bulk& b) {
  const auto piece = [&](std::uint64_t address, std::uint32_t offset, unsigned bytes) {
    std::byte* shared = shared_byte(b, offset);
    if (!address) {  // outside of the tensor: zeros in, nothing out
      if (What == kLoad) std::memset(shared, 0, bytes);
      return;
    }
    check_global(b, address, bytes);
    auto* global = reinterpret_cast<std::byte*>(address);
    if (What == kLoad)
      std::memcpy(shared, global, bytes);
    else if (What == kStore)
      std::memcpy(global, shared, bytes);
    else
      add_float(global, shared, bytes);
  };
  if (b.map.magic)
    for_tile(b, piece);
  else
    piece(b.global, 0, b.bytes);
}

// op.list: shared slot, its offset; global or map slot, its offset; bytes slot; mbarrier slot, its offset; coordinates
// op.count: coordinates; op.flags: 1 shared address is wide, 2 mbarrier address is wide; op.mode: the form
Bulk read_operands(Warp& w, const Op& op, int lane) {
  const auto address = [&](int i, bool wide) {
    return (wide ? w.reg<std::uint64_t>(op.list[i])[lane] : w.reg<std::uint32_t>(op.list[i])[lane]) +
           static_cast<std::int64_t>(static_cast<std::int32_t>(op.list[i + 1]));
  };
  Bulk b{};
  b.warp = &w;
  b.lane = lane;
  b.shared = static_cast<std::uint32_t>(address(0, op.flags & 1));
  b.global = address(2, true);
  if (op.count) {
    std::memcpy(&b.map, reinterpret_cast<const void*>(b.global), sizeof b.map);
    if (b.map.magic != kTensorMapMagic) throw Fault{lane, "no tensor map at the address given"};
    if (b.map.rank != op.count)
      throw Fault{lane, text("a tensor map of rank ", int{b.map.rank}, " with ", int{op.count}, " coordinates")};
    b.bytes = b.map.element_bytes;
    for (int i = 0; i < op.count; ++i) {
      b.coordinates[i] = w.reg<std::int32_t>(op.list[7 + i])[lane];
      b.bytes *= b.map.box[i];
    }
  } else {
    b.bytes = w.reg<std::uint32_t>(op.list[4])[lane];
    if (b.bytes % 16 || b.global % 16)
      throw Fault{lane, "a bulk copy is of multiples of 16 bytes, at multiples of 16 bytes"};
    check_global(b, b.global, b.bytes);
  }
  if (b.shared % (op.count ? 128 : 16))
    throw Fault{lane, text("a bulk copy at shared address ", b.shared, ", not a multiple of ", op.count ? 128 : 16)};
  w.block->counters.tma_bytes += b.bytes;
  return b;
}

void load_bulk(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) {
    const Bulk b = read_operands(w, op, l);
    const auto mbarrier = static_cast<std::uint32_t>(
        (op.flags & 2 ? w.reg<std::uint64_t>(op.list[5])[l] : w.reg<std::uint32_t>(op.list[5])[l]) + op.list[6]);
    find_mbarrier(w, l, mbarrier);
    resolve_one(w, l, Space::shared, b.shared, b.bytes, AccessKind::async_write);
    w.block->start_async({[b, mbarrier] {
                            move<kLoad>(b);
                            Block& block = *b.warp->block;
                            MBarrier& barrier = find_mbarrier(*b.warp, b.lane, mbarrier);
                            if (block.shadow)
                              barrier.landed.push_back({b.warp, b.lane, b.shared - kSharedBase, b.bytes});
                            complete_bytes(block, barrier, b.bytes);
                          },
                          "bulk load"});
  });
}

template <std::uint16_t What>
void store_bulk(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) {
    const Bulk b = read_operands(w, op, l);
    resolve_one(w, l, Space::shared, b.shared, b.bytes, AccessKind::async_read);
    if (w.block->launch.config.arrival == Arrival::at_once)
      move<What>(b);
    else
      w.bulk_stores.push_back({l, w.bulk_group[l], [b] { move<What>(b); }});
  });
}

void nothing(Warp&, const Op&, Mask) {}

void commit_bulk(Warp& w, const Op&, Mask m) {
  for_each_lane(m, [&](int l) { ++w.bulk_group[l]; });
}

void wait_bulk(Warp& w, const Op& op, Mask m) {
  std::erase_if(w.bulk_stores, [&](const BulkStore& store) {
    const bool due =
        (m >> store.lane & 1) && store.group + static_cast<std::uint32_t>(op.imm) < w.bulk_group[store.lane];
    if (due) store.land();
    return due;
  });
}

}  // namespace

void select_bulk(Decoder& d) {
  d.kind = Class::async_copy;
  const bool reduce = d.take("reduce");
  d.ignore({"async", "bulk"});
  if (d.take("commit_group")) {
    d.op.run = commit_bulk;
    return;
  }
  if (d.take("wait_group")) {
    d.take("read");
    d.op.imm = static_cast<std::int64_t>(d.immediate(0));
    d.op.run = wait_bulk;
    return;
  }
  d.take_cache_hints();
  if (d.take("prefetch")) {
    d.ignore({"tensor", "1d", "2d", "3d", "4d", "5d", "global", "tile"});
    d.op.run = nothing;
    return;
  }
  const bool load = d.opcode_has("mbarrier::complete_tx::bytes");
  const bool tensor = d.take("tensor");
  d.ignore({"1d", "2d", "3d", "4d", "5d", "shared::cluster", "shared::cta", "global", "tile",
            "mbarrier::complete_tx::bytes", "bulk_group"});
  if (reduce && (!d.take("add") || (!tensor && d.take_type() != Type::f32))) d.fail("bulk reductions are add of f32");
  const std::size_t shared = load ? 0 : 1, global = load ? 1 : 0;
  std::vector<Slot> slots(7, 0);
  d.address(shared);
  slots[0] = d.op.a, slots[1] = static_cast<Slot>(d.op.imm);
  d.op.flags = d.op.wide_address;
  d.op.space = Space::param;  // a map may be a parameter: its address is a generic one
  d.address(global);
  d.op.space = Space::shared;
  slots[2] = d.op.a, slots[3] = static_cast<Slot>(d.op.imm);
  if (!tensor) slots[4] = d.source(2, 4);
  if (load) {
    d.address(tensor ? 2 : 3);
    slots[5] = d.op.a, slots[6] = static_cast<Slot>(d.op.imm);
    if (d.op.wide_address) d.op.flags |= 2;
  }
  d.op.count = 0;
  if (tensor) {
    for (const ptx::Operand& c : d.operand(global).parts.at(0).parts) slots.push_back(d.source(c, 4));
    d.op.count = static_cast<std::uint8_t>(slots.size() - 7);
  }
  d.op.list = d.list(slots);
  d.op.run = load ? load_bulk : reduce ? store_bulk<kReduceAdd> : store_bulk<kStore>;
}

void add_tma(InstructionTable&) {}

}  // namespace gpusim
