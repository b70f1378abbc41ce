// cp.async.bulk: copies of any size, and of tiles described by a tensor map, by an engine of their own. Loads report to
// an mbarrier; stores are waited for by groups.
#include <algorithm>
#include <cstring>

#include "access.h"
#include "async.h"
#include "atomic.h"
#include "block.h"
#include "handlers.h"
#include "memory.h"
#include "tensor_map.h"

namespace gpusim {

namespace {

enum Form : std::uint16_t { kLoad, kStore, kReduce };

// One bulk operation, its operands read when it is issued.
struct Bulk {
  Warp* warp;
  int lane;
  std::uint32_t shared;  // address
  std::uint64_t global;  // address, or of the tensor map
  std::uint32_t bytes;
  TensorMap map;
  std::int32_t coordinates[5];
  Modify modify;  // of a reduction, and the width of its elements
  unsigned width;
};

// Calls f(global address or 0 when outside, offset in the tile, bytes) for every piece of the tile: 16 bytes where they
// lie side by side inside the tensor, else an element.
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
    const std::uint32_t together = 16 / m.element_bytes;
    const bool whole = inside && m.steps[0] == 1 && offset % 16 == 0 && index[0] + together <= m.box[0] &&
                       std::int64_t{b.coordinates[0]} + index[0] + together - 1 <= m.dims[0];
    const std::uint32_t elements = whole ? together : 1;
    f(inside ? address : 0, offset, elements * m.element_bytes);
    offset += elements * m.element_bytes;
    index[0] += elements - 1;
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

template <class T>
void reduce(std::byte* to, const std::byte* from, unsigned bytes, Modify modify) {
  for (unsigned i = 0; i < bytes; i += sizeof(T)) {
    T value;
    std::memcpy(&value, from + i, sizeof value);
    modify_atomically(reinterpret_cast<T*>(to + i), modify, value, T{0});
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
    else if (b.width == 2)
      reduce<std::uint16_t>(global, shared, bytes, b.modify);
    else if (b.width == 4)
      reduce<std::uint32_t>(global, shared, bytes, b.modify);
    else
      reduce<std::uint64_t>(global, shared, bytes, b.modify);
  };
  if (b.map.magic)
    for_tile(b, piece);
  else
    piece(b.global, 0, b.bytes);
}

// Of a kernel's parameters, or of global memory.
TensorMap tensor_map_at(Warp& w, std::uint64_t address, int coordinates, int lane) {
  const Launch& launch = w.block->launch;
  const std::uint64_t in_params = address - reinterpret_cast<std::uint64_t>(launch.param_base);
  const std::uint32_t params = launch.program->param_bytes;
  if (!(params >= sizeof(TensorMap) && in_params <= params - sizeof(TensorMap)) && launch.config.checks.global_bounds &&
      !memory_allowed(address, sizeof(TensorMap))) {
    throw Fault{lane, text("no tensor map at the address given: ", hex(address), " is ", describe_memory(address))};
  }
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<const void*>(address), sizeof map);
  if (map.magic != kTensorMapMagic) throw Fault{lane, "no tensor map at the address given"};
  if (map.rank != coordinates)
    throw Fault{lane, text("a tensor map of rank ", int{map.rank}, " with ", coordinates, " coordinates")};
  return map;
}

// op.list: shared slot, its offset; global or map slot, its offset; bytes slot; mbarrier slot, its offset; coordinates
// op.count: coordinates; op.flags: 1 shared address is wide, 2 mbarrier address is wide, 4 op.c has a mask of blocks
// op.data, op.size: what a reduction does, and to elements of how many bytes
Bulk read_operands(Warp& w, const Op& op, int lane) {
  const auto address = [&](int i, bool wide) {
    return (wide ? w.reg<std::uint64_t>(op.list[i])[lane] : w.reg<std::uint32_t>(op.list[i])[lane]) +
           static_cast<std::int64_t>(static_cast<std::int32_t>(op.list[i + 1]));
  };
  Bulk b{};
  b.warp = &w;
  b.lane = lane;
  b.modify = reinterpret_cast<Modify>(op.data);
  b.width = op.size;
  b.shared = static_cast<std::uint32_t>(address(0, op.flags & 1));
  b.global = address(2, true);
  if (op.count) {
    b.map = tensor_map_at(w, b.global, op.count, lane);
    if (op.data && b.map.element_bytes != op.size)
      throw Fault{lane, text("a tensor of ", int{b.map.element_bytes}, "-byte elements: reductions are of f32")};
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

// The barrier is completed by the asynchronous proxy: its initialisation must be known there.
void check_mbarrier(Warp& w, int lane, std::uint32_t address) {
  const MBarrier& b = find_mbarrier(w, lane, address);
  if (w.block->shadow) w.block->shadow->check_initialized(w, lane, address - kSharedBase);
  if (b.init_fenced || !w.block->launch.config.checks.mbarrier_init_fence) return;
  throw Fault{lane,
              text("a bulk copy completes the mbarrier at byte ", address - kSharedBase, ", which warp ", b.init_warp,
                   ", lane ", b.init_lane, " initialised without fence.mbarrier_init or fence.proxy.async after it")};
}

void load_bulk(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) {
    const Bulk b = read_operands(w, op, l);
    const auto mbarrier = static_cast<std::uint32_t>(
        (op.flags & 2 ? w.reg<std::uint64_t>(op.list[5])[l] : w.reg<std::uint32_t>(op.list[5])[l]) + op.list[6]);
    check_mbarrier(w, l, mbarrier);
    if ((op.flags & 4) && w.reg<std::uint16_t>(op.c)[l] != 1)
      throw Fault{l, text("a multicast to the blocks ", hex(w.reg<std::uint16_t>(op.c)[l]), " of a cluster of one")};
    if (b.bytes == 0) return;
    if (w.block->shadow) w.block->shadow->check_overwrite(w, l, b.shared - kSharedBase, b.bytes);
    resolve_one(w, l, Space::shared, b.shared, b.bytes, AccessKind::bulk_write);
    const std::uint32_t pc = w.pc - 1;
    w.block->start_async({[b, mbarrier, pc] {
                            move<kLoad>(b);
                            Block& block = *b.warp->block;
                            MBarrier& barrier = find_mbarrier(*b.warp, b.lane, mbarrier);
                            if (block.shadow)
                              barrier.landed.push_back({b.warp, b.lane, b.shared - kSharedBase, b.bytes, pc});
                            complete_bytes(block, b.lane, barrier, b.bytes);
                          },
                          "bulk load", true, &w, l, pc});
  });
}

template <std::uint16_t What>
void store_bulk(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) {
    const Bulk b = read_operands(w, op, l);
    if (b.bytes == 0) return;
    resolve_one(w, l, Space::shared, b.shared, b.bytes, AccessKind::async_read);
    BulkStore store{l, w.bulk_group[l], 0, [b] { move<What>(b); }};
    if (w.block->shadow) store.read = w.block->shadow->begin_read(w, l, {{b.shared - kSharedBase, b.bytes}});
    if (w.block->launch.config.arrival == Arrival::at_once) {
      store.land();
      store.land = nullptr;
    }
    w.bulk_stores.push_back(std::move(store));
  });
}

// op.count: coordinates; without any, op.b: bytes
void prefetch(Warp& w, const Op& op, Mask m) {
  Addresses addresses;
  compute_addresses(w, op.a, op.wide_address, op.imm, addresses);
  for_each_lane(m, [&](int l) {
    if (op.count) {
      tensor_map_at(w, addresses[l], op.count, l);
      return;
    }
    const std::uint32_t bytes = w.reg<std::uint32_t>(op.b)[l];
    if (bytes % 16 || addresses[l] % 16)
      throw Fault{l, "a bulk prefetch is of multiples of 16 bytes, at multiples of 16 bytes"};
    Bulk b{};
    b.warp = &w, b.lane = l;
    check_global(b, addresses[l], bytes);
  });
}

void commit_bulk(Warp& w, const Op&, Mask m) {
  for_each_lane(m, [&](int l) { ++w.bulk_group[l]; });
}

void wait_bulk(Warp& w, const Op& op, Mask m) {
  std::erase_if(w.bulk_stores, [&](const BulkStore& store) {
    const bool due =
        (m >> store.lane & 1) && store.group + static_cast<std::uint32_t>(op.imm) < w.bulk_group[store.lane];
    if (due && store.land) store.land();
    if (due && w.block->shadow) w.block->shadow->end_read(store.read, store.lane);
    return due;
  });
}

// The elements of a tensor have the type of its map, of which the simulator knows the size: they are taken for f32.
void select_reduction(Decoder& d, bool tensor) {
  d.ignore({"noftz"});
  const std::string_view name = d.take_any({"add", "min", "max", "and", "or", "xor", "inc", "dec"});
  const Type type = tensor ? Type::f32 : d.take_type();
  const Modify f = name.empty() ? nullptr : find_modify(name, type);
  if (!f || width_of(type) < 2 || width_of(type) > 8 || (tensor && name != "add"))
    d.fail("this bulk reduction is not known to the simulator");
  d.op.data = reinterpret_cast<const void*>(f);
  d.op.size = static_cast<std::uint8_t>(width_of(type));
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
    d.ignore({"1d", "2d", "3d", "4d", "5d", "L2", "global", "tile"});
    const bool tiles = d.take("tensor");
    d.op.space = Space::param;  // a map may be a parameter
    d.address(0);
    if (tiles)
      d.op.count = static_cast<std::uint8_t>(d.operand(0).parts.at(0).parts.size());
    else
      d.op.b = d.source(1, 4);
    d.op.run = prefetch;
    return;
  }
  const bool load = d.opcode_has("mbarrier::complete_tx::bytes");
  if (!d.opcode_has("global")) d.fail("bulk copies within shared memory are not known to the simulator");
  const bool tensor = d.take("tensor");
  d.ignore({"1d", "2d", "3d", "4d", "5d", "shared::cluster", "shared::cta", "global", "tile",
            "mbarrier::complete_tx::bytes", "bulk_group"});
  if (reduce) select_reduction(d, tensor);
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
    if (d.take("multicast::cluster")) {
      d.op.c = d.source(tensor ? 3 : 4, 2);
      d.op.flags |= 4;
    }
  }
  d.op.flags |= kOpAsyncProxy;
  d.op.count = 0;
  if (tensor) {
    for (const ptx::Operand& c : d.operand(global).parts.at(0).parts) slots.push_back(d.source(c, 4));
    d.op.count = static_cast<std::uint8_t>(slots.size() - 7);
  }
  d.op.list = d.list(slots);
  d.op.run = load ? load_bulk : reduce ? store_bulk<kReduce> : store_bulk<kStore>;
}

}  // namespace gpusim
