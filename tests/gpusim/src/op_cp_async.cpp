// cp.async: copies of 4, 8 or 16 bytes from global to shared memory that a thread waits for by groups.
// They land at their wait (late), when issued (at once), or some so and some so (random).
#include <algorithm>
#include <cstring>

#include "access.h"
#include "async.h"
#include "block.h"
#include "handlers.h"
#include "memory.h"

namespace gpusim {

namespace {

void land(PendingCopy& copy, Mask lanes) {
  if (copy.landed) return;
  for_each_lane(lanes & copy.lanes, [&](int l) {
    if (copy.from_bytes[l] == 16) {  // by far the most
      std::memcpy(copy.to[l], copy.from[l], 16);
      return;
    }
    std::memcpy(copy.to[l], copy.from[l], copy.from_bytes[l]);
    std::memset(copy.to[l] + copy.from_bytes[l], 0, copy.bytes - copy.from_bytes[l]);
  });
}

}  // namespace

namespace {

// A partial read: any number of bytes, without an alignment of its own.
const std::byte* global_bytes(Warp& w, int lane, std::uint64_t address, unsigned bytes) {
  if (w.block->launch.config.checks.global_bounds && !memory_allowed(address, bytes)) {
    throw Fault{
        lane, text("global read of ", bytes, " bytes out of bounds: ", hex(address), " is ", describe_memory(address))};
  }
  return reinterpret_cast<const std::byte*>(address);
}

// op.a: global address, op.list: shared address and offset, op.c: bytes to read, op.size: bytes to write
void copy_async(Warp& w, const Op& op, Mask m) {
  const Slot shared = op.list[0];
  const auto shared_offset = static_cast<std::int32_t>(op.list[1]);
  PendingCopy& copy = w.copies.emplace_back();
  copy.lanes = m;
  copy.bytes = op.size;
  const auto* from_bytes = w.reg<std::uint32_t>(op.c);
  const Mask skipped = op.flags & 1 ? w.pred(op.d) : 0;  // ignore-src
  Mask reading = 0;
  for_each_lane(m, [&](int l) {
    const std::uint32_t n = skipped >> l & 1 ? 0 : from_bytes[l];
    if (n > op.size) throw Fault{l, text("cp.async reads ", n, " bytes for a copy of ", int{op.size})};
    copy.from_bytes[l] = static_cast<std::uint8_t>(n);
    copy.group[l] = w.copy_group[l];
    if (n == op.size) reading |= 1u << l;
  });
  Addresses from, to;
  compute_addresses(w, op.a, op.wide_address, op.imm, from);
  compute_addresses(w, shared, op.flags & 2, shared_offset, to);
  Pointers p;
  if (reading) {
    resolve(w, Space::global, reading, from, op.size, AccessKind::read, p);
    for_each_lane(reading, [&](int l) { copy.from[l] = p[l]; });
  }
  Mask partial = 0;
  for_each_lane(m & ~reading, [&](int l) {
    if (copy.from_bytes[l]) {
      copy.from[l] = global_bytes(w, l, from[l], copy.from_bytes[l]);
      partial |= 1u << l;
    } else {
      copy.from[l] = reinterpret_cast<const std::byte*>(&copy);  // nothing is read
    }
  });
  if (partial && w.block->launch.config.count_memory)
    count_partial_read(*w.block, reading | partial, from, copy.from_bytes.data(), reading);
  resolve(w, Space::shared, m, to, op.size, AccessKind::async_write, p);
  for_each_lane(m, [&](int l) { copy.to[l] = p[l]; });
  w.block->counters.cp_async_bytes += std::uint64_t{op.size} * __builtin_popcount(m);
  const Arrival arrival = w.block->launch.config.arrival;
  if (arrival == Arrival::at_once || (arrival == Arrival::random && w.block->random() % 2)) {
    land(copy, m);
    copy.landed = true;
  }
}

void select_cp(Decoder& d) {
  if (d.opcode_has("bulk")) return select_bulk(d);
  if (!d.take("async")) d.fail("this copy is not known to the simulator");
  if (d.opcode_has("mbarrier")) return select_cp_async_mbarrier(d);
  d.kind = Class::async_copy;
  if (d.take("commit_group")) {
    d.op.run = commit_copies;
    return;
  }
  if (d.take("wait_group")) {
    d.op.imm = static_cast<std::int64_t>(d.immediate(0));
    d.op.run = wait_copies;
    return;
  }
  if (d.take("wait_all")) {
    d.op.run = wait_all_copies;
    return;
  }
  d.take_cache_hints();
  d.ignore({"shared", "shared::cta", "shared::cluster", "global"});
  d.address(0);
  const Slot shared = d.op.a;
  if (d.op.wide_address) d.op.flags |= 2;
  const auto shared_offset = static_cast<Slot>(d.op.imm);
  d.address(1);
  d.op.list = d.list({shared, shared_offset});
  d.op.size = static_cast<std::uint8_t>(d.immediate(2));
  if (d.op.size != 4 && d.op.size != 8 && d.op.size != 16) d.fail("cp.async copies 4, 8 or 16 bytes");
  if (d.opcode_has("cg") && d.op.size != 16) d.fail("cp.async.cg copies 16 bytes");
  d.op.c = d.constant(d.op.size, 4);
  for (std::size_t i = 3; i < d.operand_count(); ++i) {
    const int width = d.register_width(d.operand(i), 4);
    if (width == 1) {
      d.op.d = d.source(i, 1);
      d.op.flags |= 1;
    } else if (width == 4) {
      d.op.c = d.source(i, 4);
    }  // 8 bytes: a cache policy
  }
  d.op.run = copy_async;
}

}  // namespace

void complete_copies(Warp& w, Mask m, std::uint32_t newer_groups_left) {
  bool any = false;
  for (PendingCopy& copy : w.copies) {
    const Mask ready =
        m & copy.lanes &
        lanes_where([&](std::uint32_t group, std::uint32_t now) { return group + newer_groups_left < now; },
                    copy.group.data(), w.copy_group.data());
    if (ready == 0) continue;
    any = true;
    land(copy, ready);
    copy.lanes &= ~ready;
    if (!w.block->shadow) continue;
    std::array<std::uint32_t, kLanes> offsets;
    for (int l = 0; l < kLanes; ++l)
      offsets[l] = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(copy.to[l]) -
                                              reinterpret_cast<std::uintptr_t>(w.block->shared));
    w.block->shadow->arrived(w, ready, offsets.data(), copy.bytes);
  }
  if (!any) return;
  std::erase_if(w.copies, [](const PendingCopy& copy) { return copy.lanes == 0; });
}

void commit_copies(Warp& w, const Op&, Mask m) {
  for_each_lane(m, [&](int l) { ++w.copy_group[l]; });
}

void wait_copies(Warp& w, const Op& op, Mask m) { complete_copies(w, m, static_cast<std::uint32_t>(op.imm)); }

void wait_all_copies(Warp& w, const Op& op, Mask m) {
  commit_copies(w, op, m);
  complete_copies(w, m, 0);
}

void add_cp_async(InstructionTable& t) { t["cp"] = select_cp; }

}  // namespace gpusim
