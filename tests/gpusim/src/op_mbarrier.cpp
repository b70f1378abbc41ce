// mbarrier: arrivals and bytes complete phases, waits are for a phase or its parity.
#include <algorithm>

#include "access.h"
#include "async.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

constexpr std::int64_t kMostBytes = (1 << 20) - 1;  // a phase may be short of, or ahead by

std::string name_of(std::uint32_t address) { return text("the mbarrier at byte ", address - kSharedBase); }

}  // namespace

MBarrier& find_mbarrier(Warp& w, int lane, std::uint64_t address) {
  const auto at = static_cast<std::uint32_t>(address);
  const auto found = w.block->mbarriers.find(at);
  if (found == w.block->mbarriers.end()) {
    throw Fault{lane, text("no mbarrier was initialised at byte ", at - kSharedBase, " of shared memory")};
  }
  if (!found->second.valid) throw Fault{lane, text("uses ", name_of(at), " after mbarrier.inval")};
  return found->second;
}

std::string describe_mbarrier(Block& block, std::uint32_t address) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) return "";
  const MBarrier& b = found->second;
  return text(" at byte ", address - kSharedBase, " (its phase ", b.phase, " lacks ", b.pending, " of ", b.count,
              " arrivals and ", b.bytes, " bytes)");
}

void fence_initializations(Warp& w, Mask m) {
  for (auto& [address, b] : w.block->mbarriers) {
    if (b.init_warp == w.index && (m >> b.init_lane & 1)) b.init_fenced = true;
  }
}

namespace {

// The state that an arrival gives: the phase, and the arrivals it still needs.
constexpr int kPendingBits = 20;
std::uint64_t state_of(const MBarrier& b) { return b.phase << kPendingBits | b.pending; }

void complete_if_due(Block& block, MBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  ++b.phase;
  b.pending = b.count;
  b.completed = b.gathering;
  b.complete.insert(b.complete.end(), b.landed.begin(), b.landed.end());
  b.landed.clear();
  block.notify();
}

}  // namespace

void arrive_at(Block& block, int lane, MBarrier& b, std::uint32_t arrivals) {
  if (arrivals > b.pending && block.launch.config.checks.barriers) {
    throw Fault{lane, text(arrivals, " more arrivals at an mbarrier whose phase ", b.phase, " expects ", b.pending,
                           " (of ", b.count, ")")};
  }
  b.pending -= std::min(arrivals, b.pending);
  complete_if_due(block, b);
}

void complete_bytes(Block& block, int lane, MBarrier& b, std::int64_t bytes) {
  b.bytes -= bytes;
  if (std::abs(b.bytes) > kMostBytes && block.launch.config.checks.barriers)
    throw Fault{lane, text("the bytes an mbarrier waits for leave their range: ", b.bytes, ", at most ", kMostBytes)};
  complete_if_due(block, b);
}

namespace {

// For a thread that uses it: after its initialisation, or nothing orders them.
MBarrier& find_ordered(Warp& w, int lane, std::uint32_t address) {
  MBarrier& b = find_mbarrier(w, lane, address);
  if (w.block->shadow) w.block->shadow->check_initialized(w, lane, address - kSharedBase);
  return b;
}

void expect_bytes(Block& block, int lane, MBarrier& b, std::int64_t bytes) {
  b.bytes += bytes;
  if (b.bytes > kMostBytes && block.launch.config.checks.barriers)
    throw Fault{lane, text("the bytes an mbarrier waits for leave their range: ", b.bytes, ", at most ", kMostBytes)};
}

// Every form has its address in a, imm; b: count or bytes; c: state or parity; d: result.
template <class F>
void each_barrier(Warp& w, const Op& op, Mask m, F f) {
  Addresses addresses;
  compute_addresses(w, op.a, op.wide_address, op.imm, addresses);
  for_each_lane(m, [&](int l) { f(l, static_cast<std::uint32_t>(addresses[l])); });
}

void init(Warp& w, const Op& op, Mask m) {
  Pointers p;
  operand_pointers(w, op, m, 8, AccessKind::write, p);
  each_barrier(w, op, m, [&](int l, std::uint32_t address) {
    const std::uint32_t count = w.reg<std::uint32_t>(op.b)[l];
    if (count < 1 || count >= 1u << 20) throw Fault{l, text("an mbarrier of ", count, " arrivals")};
    MBarrier& b = w.block->mbarriers[address];
    if (b.count && b.valid && w.block->launch.config.checks.barriers)
      throw Fault{l, text("initialises ", name_of(address), " again, without mbarrier.inval between")};
    b = MBarrier{};
    b.count = b.pending = count;
    b.init_warp = w.index, b.init_lane = l;
  });
}

void invalidate(Warp& w, const Op& op, Mask m) {
  each_barrier(w, op, m, [&](int l, std::uint32_t address) { find_ordered(w, l, address).valid = false; });
}

// op.mode: 1 arrive, 2 expect_tx, 3 both, 4 complete_tx, 5 arrive_drop; op.flags 1: gives the state, 2: relaxed.
// Only arrivals hand over what the thread did before.
void arrive(Warp& w, const Op& op, Mask m) {
  Addresses addresses;
  compute_addresses(w, op.a, op.wide_address, op.imm, addresses);
  Mask handed_over = 0;
  for_each_lane(m, [&](int l) {
    const auto address = static_cast<std::uint32_t>(addresses[l]);
    MBarrier& b = find_ordered(w, l, address);
    const std::uint32_t operand = w.reg<std::uint32_t>(op.b)[l];
    const bool arrives = op.mode == 1 || op.mode == 3 || op.mode == 5;
    if (op.flags & 1) w.reg<std::uint64_t>(op.d)[l] = state_of(b);
    if (w.block->shadow && arrives && !(op.flags & 2) && !(handed_over >> l & 1)) {
      Mask here = 0;  // the lanes that arrive at this one
      for_each_lane(m, [&](int k) { here |= static_cast<Mask>(addresses[k] == addresses[l]) << k; });
      w.block->shadow->release(w, here, b.gathering);
      handed_over |= here;
    }
    if (op.mode == 2 || op.mode == 3) expect_bytes(*w.block, l, b, operand);
    if (op.mode == 4) complete_bytes(*w.block, l, b, operand);
    if (op.mode == 5) b.count -= std::min(operand, b.count);
    if (op.mode == 1 || op.mode == 5) arrive_at(*w.block, l, b, operand);
    if (op.mode == 3) arrive_at(*w.block, l, b, 1);
  });
}

// What copies wrote in its phases becomes known to those who wait for it, as the work of an agent: what else the
// threads did that issued them stays their own.
void publish(Shadow& shadow, MBarrier& b) {
  shadow.publish(b.agent, b.completed);
  b.gathering[32 + b.agent] = b.completed[32 + b.agent];
}

int agent_of(Shadow& shadow, MBarrier& b) {
  if (b.agent < 0) b.agent = shadow.new_agent();
  return b.agent;
}

// The first wait for a phase settles what its bulk copies wrote.
void settle(Shadow& shadow, MBarrier& b) {
  shadow.arrive_by(agent_of(shadow, b));
  for (const Landed& l : b.complete) shadow.arrived(*l.warp, l.lane, l.offset, l.bytes);
  shadow.arrive_by(-1);
  publish(shadow, b);
  b.complete.clear();
}

// op.mode: 1 parity; op.flags 1: waits, 2: relaxed
void wait(Warp& w, const Op& op, Mask m) {
  Mask done = 0;
  Clock known{};
  const MBarrier* last = nullptr;
  each_barrier(w, op, m, [&](int l, std::uint32_t address) {
    MBarrier& b = find_ordered(w, l, address);
    w.mbarrier = address;
    if (const std::uint64_t of = w.reg<std::uint64_t>(op.c)[op.mode ? 0 : l] >> kPendingBits;
        !op.mode && of + 1 < b.phase && w.block->launch.config.checks.barriers) {
      throw Fault{l, text("waits for phase ", of, " of ", name_of(address), ", which is in phase ", b.phase,
                          ": only the current and the last phase can be waited for")};
    }
    const bool complete = op.mode ? (b.phase & 1) != (w.reg<std::uint32_t>(op.c)[l] & 1)
                                  : b.phase != w.reg<std::uint64_t>(op.c)[l] >> kPendingBits;
    if (!complete) return;
    done |= 1u << l;
    if (w.block->shadow && !b.complete.empty()) settle(*w.block->shadow, b);
    if (last != &b) known.join(b.completed);
    last = &b;
  });
  if (done != m) {
    if (op.flags & 1) return w.block_on(kWaitsForMbarrier);
    w.block->land_something();
    w.yield();
  }
  if (done && w.block->shadow && !(op.flags & 2)) w.block->shadow->acquire(w, known);
  Mask& p = w.pred(op.d);
  p = (p & ~m) | done;
}

void pending_count(Warp& w, const Op& op, Mask m) {
  const auto* state = w.reg<std::uint64_t>(op.c);
  for_each_lane(m, [&](int l) {
    w.reg<std::uint32_t>(op.d)[l] = static_cast<std::uint32_t>(state[l] & ((1u << kPendingBits) - 1));
  });
}

void select_mbarrier(Decoder& d) {
  d.kind = Class::synchronization;
  const std::string_view what = d.take_any(
      {"init", "inval", "arrive_drop", "arrive", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"});
  const bool with_bytes = what == "arrive" && d.take("expect_tx");
  d.ignore({"release", "acquire", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "noComplete"});
  const std::uint16_t relaxed = d.take("relaxed") ? 2 : 0;
  d.op.space = Space::shared;
  const bool parity = d.take("parity");
  d.take_type();
  if (what == "pending_count") {
    d.op.d = d.dest(0, 4);
    d.op.c = d.source(1, 8);
    d.op.run = pending_count;
    return;
  }
  if (what == "init" || what == "inval") {
    d.address(0);
    if (what == "init") d.op.b = d.source(1, 4);
    d.op.run = what == "init" ? init : invalidate;
    return;
  }
  if (what == "test_wait" || what == "try_wait") {
    d.op.d = d.predicate(d.operand(0).name);
    d.address(1);
    d.op.c = d.source(2, parity ? 4 : 8);
    d.op.mode = parity;
    d.op.flags = (what == "try_wait") | relaxed;
    d.op.run = wait;
    return;
  }
  const bool gives_state = d.operand(0).kind == ptx::Operand::Kind::name;
  const std::size_t at = gives_state ? 1 : 0;
  if (gives_state && d.operand(0).name != "_") {
    d.op.d = d.dest(0, 8);
    d.op.flags = 1;
  }
  d.op.flags |= relaxed;
  d.address(at);
  d.op.b = d.operand_count() > at + 1 ? d.source(at + 1, 4) : d.constant(1, 4);
  d.op.mode = what == "arrive_drop" ? 5 : with_bytes ? 3 : what == "arrive" ? 1 : what == "expect_tx" ? 2 : 4;
  d.op.run = arrive;
}

// cp.async.mbarrier.arrive: arrives when all copies the thread issued so far have landed. Without .noinc the phase
// waits for one arrival more.
void arrive_after_copies(Warp& w, const Op& op, Mask m) {
  each_barrier(w, op, m, [&](int l, std::uint32_t address) {
    MBarrier& b = find_ordered(w, l, address);
    if (op.mode == 0) ++b.pending;
    Warp* warp = &w;
    const std::uint32_t group = ++w.copy_group[l];
    w.block->start_async({[warp, l, group, address] {
                            MBarrier& barrier = find_mbarrier(*warp, l, address);
                            Shadow* const shadow = warp->block->shadow.get();
                            if (shadow) shadow->arrive_by(agent_of(*shadow, barrier));
                            complete_copies(*warp, 1u << l, warp->copy_group[l] - group);
                            if (shadow) {
                              shadow->arrive_by(-1);
                              shadow->publish(barrier.agent, barrier.gathering);
                            }
                            arrive_at(*warp->block, l, barrier, 1);
                          },
                          "cp.async.mbarrier.arrive"});
  });
}

}  // namespace

void select_cp_async_mbarrier(Decoder& d) {
  d.ignore({"mbarrier", "arrive", "shared", "shared::cta"});
  d.op.mode = d.take("noinc");
  d.take_type();
  d.kind = Class::async_copy;
  d.op.space = Space::shared;
  d.address(0);
  d.op.run = arrive_after_copies;
}

void select_red_async(Decoder& d) { d.fail("red.async is not known to the simulator"); }

void add_mbarrier(InstructionTable& t) { t["mbarrier"] = select_mbarrier; }

}  // namespace gpusim
