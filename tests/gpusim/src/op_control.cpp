// Branches, ends, barriers of the block, fences, and what only takes time.
#include "async.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

void branch_always(Warp& w, const Op& op, Mask m) { w.branch(m, static_cast<std::uint32_t>(op.imm)); }

// For the tables of brx: lanes whose index equals the constant jump.
void branch_if_equal(Warp& w, const Op& op, Mask m) {
  const auto* a = w.reg<std::uint32_t>(op.a);
  const auto* b = w.reg<std::uint32_t>(op.b);
  Mask taken = 0;
  for_each_lane(m, [&](int l) { taken |= static_cast<Mask>(a[l] == b[l]) << l; });
  if (taken) w.branch(taken, static_cast<std::uint32_t>(op.imm));
}

namespace {

void end(Warp& w, const Op&, Mask m) { w.exit(m); }

void trap(Warp&, const Op&, Mask m) { throw Fault{__builtin_ctz(m), "trap"}; }

void sleep(Warp& w, const Op&, Mask) { w.yield(); }

void nothing(Warp&, const Op&, Mask) {}

// The whole warp arrives at a barrier. op.a: number, op.b: threads (0: all); op.flags bit 0: waits;
// op.mode: 0 no reduction, 1 popc, 2 and, 3 or of predicate op.c
void barrier(Warp& w, const Op& op, Mask m) {
  if (!w.gather(w.live)) return;
  if (m != w.live) throw Fault{__builtin_ctz(w.live & ~m), "a barrier is executed by a part of its warp"};
  const int lane = __builtin_ctz(m);
  const auto id = static_cast<int>(w.reg<std::uint32_t>(op.a)[lane]);
  const auto threads = static_cast<int>(w.reg<std::uint32_t>(op.b)[lane]);
  w.block->arrive(w, id, threads, op.flags & 1, op.mode ? w.pred(op.c) ^ static_cast<Mask>(op.imm) : 0);
}

void select_bar(Decoder& d) {
  d.ignore({"cta", "aligned"});
  d.kind = Class::synchronization;
  if (d.take("warp")) {
    d.take("sync");
    d.op.a = d.source(0, 4);
    d.op.run = warp_sync;
    return;
  }
  const std::string_view what = d.take_any({"sync", "arrive", "red"});
  std::size_t next = 0;
  if (what == "red") {
    const std::string_view reduction = d.take_any({"popc", "and", "or"});
    d.take_type();
    d.op.mode = reduction == "popc" ? 1 : reduction == "and" ? 2 : 3;
    d.op.d = d.op.mode == 1 ? d.dest(0, 4) : d.predicate(d.operand(0).name);
    const ptx::Operand& p = d.operand(d.operand_count() - 1);
    d.op.c = d.source(p, 1);
    d.op.imm = p.negated ? -1 : 0;
    next = 1;
  }
  const std::size_t last = d.operand_count() - (what == "red");
  d.op.a = d.source(next, 4);
  d.op.b = next + 1 < last ? d.source(next + 1, 4) : d.constant(0, 4);
  d.op.flags = what != "arrive";
  d.op.run = barrier;
}

void select_bra(Decoder& d) {
  d.take("uni");
  d.kind = Class::control;
  d.op.run = branch_always;
}

void select_ret(Decoder& d) {
  d.take("uni");
  d.kind = Class::control;
  d.op.run = d.inside_call() ? branch_always : end;
}

template <Handler H>
void select_plain(Decoder& d) {
  d.kind = Class::control;
  d.ignore({"u32", "launch_dependents", "wait"});
  d.op.run = H;
}

// fence.proxy.async: what these threads wrote to shared memory can be seen by bulk copies and wgmma once it is handed
// over, mbarriers they initialised included.
void fence_proxy(Warp& w, const Op&, Mask m) {
  if (w.block->shadow) w.block->shadow->fence_proxy(w, m);
  fence_initializations(w, m);
}

void fence_init(Warp& w, const Op&, Mask m) { fence_initializations(w, m); }

// Memory of a block is coherent in the simulator: fences within the generic proxy do nothing. What orders is the
// barrier, mbarrier or __syncwarp beside them.
void select_fence(Decoder& d) {
  d.kind = Class::synchronization;
  d.ignore({"sc", "acq_rel", "acquire", "release", "cta", "gpu", "sys", "gl", "cluster", "sync_restrict::shared::cta",
            "sync_restrict::shared::cluster"});
  d.op.run = nothing;
  if (d.take("mbarrier_init")) d.op.run = fence_init;
  if (!d.take("proxy")) return;
  const std::string_view which =
      d.take_any({"async", "async::generic", "alias", "tensormap", "tensormap::generic", "generic"});
  const bool only_global = d.take("global");
  d.ignore({"shared::cta", "shared::cluster", "generic"});
  const bool from_async = which == "async::generic" && d.opcode_has("acquire");
  if (which.substr(0, 5) == "async" && !only_global && !from_async) d.op.run = fence_proxy;
}

// op.flags 1: the whole warp executes it together, 2: relaxed
void cluster_arrive(Warp& w, const Op& op, Mask m) {
  if ((op.flags & 1) && !w.gather(w.live)) return;
  Block& block = *w.block;
  ClusterBarrier& barrier = block.cluster;
  const Mask again = m & (barrier.arrived[w.index] | barrier.may_pass[w.index]);
  if (again && block.launch.config.checks.barriers)
    throw Fault{__builtin_ctz(again), "arrives twice at the barrier of the cluster, without a wait between"};
  barrier.may_pass[w.index] &= ~m;
  barrier.arrived[w.index] |= m;
  if (block.shadow && !(op.flags & 2)) block.shadow->release(w, m, barrier.gathering);
  ++block.counters.barriers;
  block.complete_cluster();
}
void cluster_wait(Warp& w, const Op& op, Mask m) {
  if ((op.flags & 1) && !w.gather(w.live)) return;
  Block& block = *w.block;
  block.complete_cluster();  // the last threads it waited for may have exited
  ClusterBarrier& barrier = block.cluster;
  const Mask early = m & ~(barrier.arrived[w.index] | barrier.may_pass[w.index]);
  if (early && block.launch.config.checks.barriers)
    throw Fault{__builtin_ctz(early), "waits at the barrier of the cluster without having arrived"};
  if (m & barrier.arrived[w.index]) return w.block_on("the barrier of the cluster");
  barrier.may_pass[w.index] &= ~m;
  if (block.shadow) block.shadow->acquire(w, barrier.completed);
}
void select_cluster_barrier(Decoder& d) {
  if (!d.take("cluster")) return select_bar(d);
  const std::string_view what = d.take_any({"arrive", "wait"});
  d.ignore({"release", "acquire"});
  d.op.flags = d.take("aligned") | (d.take("relaxed") ? 2 : 0);
  d.kind = Class::synchronization;
  d.op.run = what == "arrive" ? cluster_arrive : cluster_wait;
}

}  // namespace

void add_control(InstructionTable& t) {
  t["bra"] = select_bra;
  t["ret"] = select_ret;
  t["exit"] = select_plain<end>;
  t["trap"] = select_plain<trap>;
  t["brkpt"] = select_plain<nothing>;
  t["nanosleep"] = select_plain<sleep>;
  t["griddepcontrol"] = select_plain<nothing>;
  t["pmevent"] = select_plain<nothing>;
  t["membar"] = select_fence;
  t["fence"] = select_fence;
  t["bar"] = select_bar;
  t["barrier"] = select_cluster_barrier;
}

}  // namespace gpusim
