#include "block.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "async.h"
#include "lanes.h"
#include "module.h"

namespace gpusim {

namespace {

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

std::uint64_t special_value(const Launch& launch, const Block& block, const Warp& warp, Special which, int lane) {
  const unsigned* dim = launch.block;
  const unsigned thread = warp.index * kLanes + lane;
  const Mask bit = 1u << lane;
  switch (which) {
    case Special::tid_x: return thread % dim[0];
    case Special::tid_y: return thread / dim[0] % dim[1];
    case Special::tid_z: return thread / dim[0] / dim[1];
    case Special::ntid_x: return dim[0];
    case Special::ntid_y: return dim[1];
    case Special::ntid_z: return dim[2];
    case Special::ctaid_x: return block.ctaid[0];
    case Special::ctaid_y: return block.ctaid[1];
    case Special::ctaid_z: return block.ctaid[2];
    case Special::nctaid_x: return launch.grid[0];
    case Special::nctaid_y: return launch.grid[1];
    case Special::nctaid_z: return launch.grid[2];
    case Special::laneid: return lane;
    case Special::warpid: return warp.index;
    case Special::nwarpid: return block.warps.size();
    case Special::smid: return block.index % launch.config.multiprocessors;
    case Special::nsmid: return launch.config.multiprocessors;
    case Special::lanemask_eq: return bit;
    case Special::lanemask_lt: return bit - 1;
    case Special::lanemask_le: return bit | (bit - 1);
    case Special::lanemask_gt: return ~(bit | (bit - 1));
    case Special::lanemask_ge: return ~(bit - 1);
    case Special::dynamic_smem_size: return launch.dynamic_shared;
    case Special::total_smem_size: return launch.shared_total();
    case Special::param_address: return reinterpret_cast<std::uint64_t>(launch.param_base);
    case Special::one: return 1;
    case Special::gridid:
    case Special::zero: return 0;
  }
  return 0;
}

}  // namespace

Block::Block(Launch& l, Counters& c, std::uint64_t* executed) : launch(l), counters(c), executed_(executed) {
  const std::size_t warp_count = (launch.threads_per_block() + kLanes - 1) / kLanes;
  const std::size_t register_bytes = round_up(launch.program->register_bytes, 128);
  const std::size_t local_bytes = round_up(launch.program->local_bytes, 16);
  shared_bytes = launch.shared_total();
  const std::size_t shared_size = round_up(shared_bytes, 1024);
  storage_.reset(new std::byte[1024 + shared_size + warp_count * (register_bytes + kLanes * local_bytes)]);
  const auto base = reinterpret_cast<std::uintptr_t>(storage_.get());
  shared = storage_.get() + (round_up(base, 1024) - base);
  regs_ = shared + shared_size;
  local_ = regs_ + warp_count * register_bytes;
  warps.resize(warp_count);
  for (std::size_t w = 0; w < warp_count; ++w) {
    warps[w].regs = regs_ + w * register_bytes;
    warps[w].local = local_ + w * kLanes * local_bytes;
    warps[w].local_stride = static_cast<std::uint32_t>(local_bytes);
    warps[w].index = static_cast<int>(w);
    warps[w].block = this;
    warps[w].code = launch.program->code.data();
    warps[w].executed = executed_;
  }
  const Checks& checks = launch.config.checks;
  if (shared_bytes > 0 && (checks.races || checks.uninitialized || checks.async_wait ||
                           (checks.proxy_fences && launch.program->async_proxy))) {
    shadow = std::make_unique<Shadow>(*this, shared_bytes, launch.program->shared_granule_shift);
  }
}

void Block::start(std::uint64_t linear_index) {
  index = linear_index;
  ctaid[0] = static_cast<unsigned>(index % launch.grid[0]);
  ctaid[1] = static_cast<unsigned>(index / launch.grid[0] % launch.grid[1]);
  ctaid[2] = static_cast<unsigned>(index / launch.grid[0] / launch.grid[1]);
  random_state_ = launch.config.seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull + 1;
  events = 1;
  steps = 0;
  progress_ = progress_at_ = look_at_ = 0;
  std::memset(shared, 0xff, shared_bytes);
  for (NamedBarrier& barrier : barriers) barrier = NamedBarrier{};
  cluster = {std::vector<Mask>(warps.size()), std::vector<Mask>(warps.size()), {}, {}};
  mbarriers.clear();
  in_flight.clear();
  if (shadow) shadow->start();
  if (launch.program->watch) wgmma.assign(warps.size(), WarpgroupState(*launch.program->watch));
  free_registers = 0;
  const int threads = launch.threads_per_block();
  for (Warp& warp : warps) {
    const int lanes = std::min(threads - warp.index * kLanes, kLanes);
    warp.live = warp.active = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.state = Warp::State::ready;
    warp.parked = 0;
    warp.pc = 0;
    warp.stop = ~0u;
    warp.barrier = -1;
    warp.copies.clear();
    warp.copy_group.fill(0);
    warp.bulk_stores.clear();
    warp.bulk_group.fill(0);
    warp.registers = launch.registers_per_thread();
    fill_registers(warp);
  }
}

void Block::fill_registers(Warp& warp) {
  std::memcpy(warp.regs, launch.register_image.data(), launch.register_image.size());
  for (const SpecialSlot& special : launch.program->specials) {
    const bool uniform = special.which >= Special::ntid_x && special.which != Special::laneid &&
                         !(special.which >= Special::lanemask_eq && special.which <= Special::lanemask_ge);
    std::uint64_t value = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (l == 0 || !uniform) value = special_value(launch, *this, warp, special.which, l) + special.offset;
      if (special.width == 8)
        warp.reg<std::uint64_t>(special.slot)[l] = value;
      else if (special.width == 4)
        warp.reg<std::uint32_t>(special.slot)[l] = static_cast<std::uint32_t>(value);
      else
        warp.reg<std::uint16_t>(special.slot)[l] = static_cast<std::uint16_t>(value);
    }
  }
}

std::uint32_t Block::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return static_cast<std::uint32_t>(random_state_ >> 32);
}

bool Block::run(std::uint64_t budget) {
  const bool shuffled = launch.config.seed != 0;
  std::vector<int> order(warps.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::uint64_t used = 0; used < budget;) {
    if (shuffled) {
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    }
    bool progress = false, alive = false;
    const std::uint64_t before = used;
    for (const int w : order) {
      Warp& warp = warps[w];
      if (warp.state == Warp::State::done) continue;
      alive = true;
      if (warp.state == Warp::State::at_barrier) continue;
      if (warp.state == Warp::State::blocked && warp.blocked_at == events) continue;
      progress = true;
      const std::uint64_t quantum = shuffled ? 1 + random() % (random() % 8 == 0 ? 2048 : 48) : 1u << 16;
      try {
        used += warp.run(quantum);
        if (warp.state == Warp::State::done) warp_ended(warp);
      } catch (const Fault& fault) {
        rethrow(warp, fault, warp.pc - 1);
      }
    }
    if (!alive) {
      ended();
      return true;
    }
    if (!progress && !land()) deadlock();
    steps += used - before;
    if (steps >= look_at_) check_limits();
  }
  return false;
}

void Block::check_limits() {
  const std::uint64_t most = launch.config.step_limit, idle = launch.config.poll_limit;
  if (most && steps > most) {
    throw Error(text("kernel ", launch.program->name, ", block ", index, ": more than ", most,
                     " warp instructions (the limit that was set: step_limit)"));
  }
  std::uint64_t progress = events;
  for (std::size_t i = 0; i < launch.program->code.size(); ++i) {
    const Class kind = launch.program->info[i].kind;
    if (kind == Class::store_global || kind == Class::store_shared || kind == Class::atomic ||
        kind == Class::async_copy)
      progress += executed_[i];
  }
  if (progress != progress_) {
    progress_ = progress;
    progress_at_ = steps;
  } else if (idle && steps - progress_at_ > idle) {
    std::string report = text("kernel ", launch.program->name, ", block ", index, ": ", idle,
                              " warp instructions without a store or anything that completes (poll_limit): it polls");
    for (const Warp& warp : warps) {
      if (warp.state == Warp::State::done) continue;
      report += text("\n  warp ", warp.index, " at ", launch.program->module->place(*launch.program, warp.pc));
    }
    throw Error(report);
  }
  look_at_ =
      steps + std::max<std::uint64_t>(std::min({(most ? most : ~0ull) / 8, (idle ? idle : ~0ull) / 8, 1ull << 22}), 1);
}

bool Block::land() {
  try {
    return land_something();
  } catch (const Fault& fault) {
    throw Error(text(fault.message, "\n  in kernel ", launch.program->name, ", block ", index,
                     ", when an asynchronous operation landed"));
  }
}

void Block::start_async(AsyncEvent event) {
  const Arrival arrival = launch.config.arrival;
  if (arrival == Arrival::at_once || (arrival == Arrival::random && random() % 2))
    event.land();
  else
    in_flight.push_back(std::move(event));
}

bool Block::land_something() {
  if (in_flight.empty()) return false;
  const std::size_t which = launch.config.arrival == Arrival::random ? random() % in_flight.size() : 0;
  const AsyncEvent event = std::move(in_flight[which]);
  in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(which));
  event.land();
  notify();
  return true;
}

void Block::arrive(Warp& warp, int id, int threads, bool wait, Mask votes) {
  if (id < 0 || id > 15) throw Fault{-1, text("barrier ", id, " does not exist (0 to 15)")};
  if (threads % kLanes) throw Fault{-1, text("barrier ", id, " for ", threads, " threads, not a multiple of 32")};
  NamedBarrier& barrier = barriers[id];
  const int all = static_cast<int>(warps.size()) * kLanes;
  const int expected = threads ? threads : all;
  if (barrier.expected == 0) {
    barrier.expected = expected;
  } else if (barrier.expected != expected && launch.config.checks.barriers) {
    throw Fault{-1,
                text("barrier ", id, " is used with ", expected, " threads, but others wait for ", barrier.expected)};
  }
  if ((barrier.arrived_warps >> warp.index & 1) && launch.config.checks.barriers) {
    throw Fault{-1, text("warp ", warp.index, " arrives twice at barrier ", id, " before it completes")};
  }
  barrier.arrived += kLanes;
  barrier.arrived_warps |= 1u << warp.index;
  barrier.latest = &warp;
  barrier.pc = warp.pc - 1;
  barrier.votes += __builtin_popcount(votes & warp.live);
  barrier.voters += __builtin_popcount(warp.live);
  ++counters.barriers;
  if (shadow) shadow->release(warp, barrier.clock);
  if (wait) {
    barrier.waiting |= 1u << warp.index;
    warp.wait_at_barrier(id);
  }
  int gone = 0;
  if (!threads) {
    for (const Warp& w : warps) gone += w.state == Warp::State::done ? kLanes : 0;
  }
  if (gone && launch.config.checks.barriers) {
    throw Fault{-1,
                text("barrier ", id, " of the whole block, but ", gone / kLanes, " of its warps have already exited")};
  }
  if (barrier.arrived + gone >= barrier.expected) release(id);
}

void Block::release(int id) {
  NamedBarrier& barrier = barriers[id];
  if (shadow) shadow->meet(barrier.waiting, barrier.clock);
  for (Warp& warp : warps) {
    if (!(barrier.waiting >> warp.index & 1)) continue;
    warp.state = Warp::State::ready;
    warp.barrier = -1;
    if (shadow) shadow->acquire(warp, barrier.clock);
    const Op& op = warp.code[warp.pc - 1];
    if (op.mode == 0) continue;  // no reduction
    if (op.mode == 1) {
      for_each_lane(warp.live, [&](int l) { warp.reg<std::uint32_t>(op.d)[l] = barrier.votes; });
    } else {
      const bool holds = op.mode == 2 ? barrier.votes == barrier.voters : barrier.votes > 0;
      Mask& d = warp.pred(op.d);
      d = holds ? d | warp.live : d & ~warp.live;
    }
  }
  barrier = NamedBarrier{};
  notify();
}

void Block::complete_cluster() {
  bool any = false;
  for (const Warp& warp : warps) {
    if (warp.live & ~cluster.arrived[warp.index]) return;
    any |= cluster.arrived[warp.index] != 0;
  }
  if (!any) return;
  for (std::size_t w = 0; w < warps.size(); ++w) cluster.may_pass[w] |= std::exchange(cluster.arrived[w], 0);
  cluster.completed = cluster.gathering;
  notify();
}

void Block::warp_ended(Warp& warp) {
  notify();
  for (const BulkStore& store : warp.bulk_stores) {
    if (launch.config.checks.async_wait)
      throw Fault{store.lane, "exits while a bulk store of its may still read shared memory: no wait_group came"};
    if (store.land) store.land();
    if (shadow) shadow->end_read(store.read, store.lane);
  }
  warp.bulk_stores.clear();
  for (int id = 0; id < 16; ++id) {
    NamedBarrier& barrier = barriers[id];
    if (barrier.expected == 0) continue;
    const int all = static_cast<int>(warps.size()) * kLanes;
    if (barrier.expected != all || (barrier.arrived_warps >> warp.index & 1)) continue;
    if (launch.config.checks.barriers) {
      throw Fault{-1, text("warp ", warp.index, " exits while other warps wait for it at barrier ", id)};
    }
    int gone = 0;
    for (const Warp& w : warps) gone += w.state == Warp::State::done ? kLanes : 0;
    if (barrier.arrived + gone >= barrier.expected) release(id);
  }
}

// Nothing may be left over when the last warp has exited.
void Block::ended() {
  if (launch.config.checks.async_wait) {
    const auto refuse = [this](const Warp& warp, int lane, std::uint32_t pc, const char* what) {
      rethrow(warp, {lane, text("the block ended while a ", what, " was in flight that nobody waited for")}, pc);
    };
    for (const AsyncEvent& event : in_flight) {
      if (event.must_be_waited_for) refuse(*event.warp, event.lane, event.pc, event.what);
    }
    for (const auto& [address, barrier] : mbarriers) {
      for (const std::vector<Landed>* list : {&barrier.landed, &barrier.complete}) {
        for (const Landed& landed : *list) refuse(*landed.warp, landed.lane, landed.pc, "bulk load");
      }
    }
  }
  if (!launch.config.checks.barriers) return;
  for (int id = 0; id < 16; ++id) {
    const NamedBarrier& barrier = barriers[id];
    if (barrier.expected == 0) continue;
    rethrow(*barrier.latest,
            {-1, text("the block ended with ", barrier.arrived, " of ", barrier.expected, " threads at barrier ", id)},
            barrier.pc);
  }
}

void Block::deadlock() {
  std::string report = text("kernel ", launch.program->name, ", block ", index, ": deadlock, nothing can run any more");
  for (const Warp& warp : warps) {
    if (warp.state == Warp::State::done) continue;
    report += text("\n  warp ", warp.index);
    if (warp.state == Warp::State::at_barrier) {
      const NamedBarrier& barrier = barriers[warp.barrier];
      report += text(" waits at barrier ", warp.barrier, " (", barrier.arrived, " of ", barrier.expected,
                     " threads are here), ", launch.program->module->place(*launch.program, warp.pc - 1));
    } else {
      report += text(" waits for ", warp.waiting_for);
      if (warp.waiting_for == kWaitsForMbarrier) report += describe_mbarrier(*this, warp.mbarrier);
      std::uint32_t last = ~0u;
      for_each_lane(warp.live, [&](int l) {
        if (warp.lane_pc[l] == last) return;
        last = warp.lane_pc[l];
        report += text("; lane ", l, " at ", launch.program->module->place(*launch.program, last));
      });
    }
  }
  throw Error(report);
}

void Block::rethrow(const Warp& warp, const Fault& fault, std::uint32_t pc) {
  std::string where = text("kernel ", launch.program->name, ", block (", ctaid[0], ",", ctaid[1], ",", ctaid[2],
                           "), warp ", warp.index);
  if (fault.lane >= 0) where += text(", lane ", fault.lane);
  throw Error(fault.message + "\n  in " + where + "\n  at " + launch.program->module->place(*launch.program, pc));
}

}  // namespace gpusim
