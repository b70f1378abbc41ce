#include "wgmma_registers.h"

#include <algorithm>
#include <map>

#include "block.h"
#include "module.h"

namespace gpusim {

namespace {

using Register = WarpgroupState::Register;

std::string place(const Warp& w, std::uint32_t pc) {
  const Program& program = *w.block->launch.program;
  return program.module->place(program, pc);
}

// An ordinary instruction names registers of wgmma.
void check(Warp& w, const WatchedOp& op, Mask m) {
  WarpgroupState& state = w.block->wgmma[w.index];
  const WarpgroupState::Touch now{state.fences + 1, w.pc - 1};
  const int lane = __builtin_ctz(m);
  const auto overwrite = [&](Register& r) {
    if (r.group && !r.moved)
      throw Fault{lane, text("overwrites an accumulator before wgmma.wait_group has waited for ", place(w, r.product))};
    if (r.input_group)
      throw Fault{
          lane, text("overwrites a fragment of A before wgmma.wait_group has waited for ", place(w, r.input_product))};
  };
  if (op.copy) {  // the accumulator moves; whatever was known of it moves along
    Register& to = state.registers[op.writes[0]];
    Register unwatched;
    unwatched.written = now;
    Register& from = op.reads.empty() ? unwatched : state.registers[op.reads[0]];
    if (&to == &from) return;
    overwrite(to);
    to = from;
    to.moved = false;
    to.input_group = 0;
    from.moved = true;
    return;
  }
  for (const std::uint16_t i : op.reads) {
    Register& r = state.registers[i];
    if (r.group)
      throw Fault{lane, text("reads an accumulator before wgmma.wait_group has waited for ", place(w, r.product))};
    r.read = now;
  }
  for (const std::uint16_t i : op.writes) {
    Register& r = state.registers[i];
    overwrite(r);
    r.group = 0;
    r.written = now;
  }
}

void watched(Warp& w, const Op& op, Mask m) {
  const WatchedOp& seen = w.block->launch.program->watch->op(w.pc - 1);
  if (w.block->launch.config.checks.wgmma_registers) check(w, seen, m);
  seen.run(w, op, m);
}

}  // namespace

std::shared_ptr<const RegisterWatch> watch_registers(std::vector<Op>& code, const RegisterUses& uses,
                                                     const std::vector<std::size_t>& products) {
  std::map<Slot, std::uint16_t> number;
  const auto add = [&](Slot slot) {
    return number.try_emplace(slot, static_cast<std::uint16_t>(number.size())).second;
  };
  for (const std::size_t product : products) {
    for (const RegisterUse& use : uses.of(product)) {
      if (use.width == 4) add(use.slot);  // the others are descriptors and predicates
    }
  }
  for (bool grown = true; grown;) {
    grown = false;
    for (std::size_t i = 0; i < code.size(); ++i) {
      if (!uses.copies[i] || number.count(uses.of(i)[0].slot) == number.count(uses.of(i)[1].slot)) continue;
      for (const RegisterUse& use : uses.of(i)) grown |= add(use.slot);
    }
  }
  auto watch = std::make_shared<RegisterWatch>();
  watch->registers = number.size();
  watch->at.resize(code.size());
  for (std::size_t i = 0; i < code.size(); ++i) {
    WatchedOp op;
    op.copy = uses.copies[i];
    for (const RegisterUse& use : uses.of(i)) {
      if (const auto found = number.find(use.slot); found != number.end())
        (use.writes ? op.writes : op.reads).push_back(found->second);
    }
    if (op.reads.empty() && op.writes.empty()) continue;
    if (!std::binary_search(products.begin(), products.end(), i)) {
      op.run = code[i].run;
      code[i].run = watched;
    }
    watch->ops.push_back(std::move(op));
    watch->at[i] = static_cast<std::uint32_t>(watch->ops.size());
  }
  return watch;
}

void WarpgroupState::begin(Warp& w, std::uint32_t shape) {
  const WatchedOp& op = w.block->launch.program->watch->op(w.pc - 1);
  const std::uint32_t now = fences + 1;
  if (w.block->launch.config.checks.wgmma_registers) {
    if (fences == 0) throw Fault{0, "the first wgmma without a wgmma.fence before it"};
    const auto refuse = [&](const char* what, const char* did, std::uint32_t pc) {
      throw Fault{0, text(what, " of wgmma was ", did, " since the last wgmma.fence, by ", place(w, pc))};
    };
    for (const std::uint16_t i : op.writes) {
      const Register& r = registers[i];
      if (r.input_group)
        throw Fault{0, text("accumulates into a fragment of A that is in flight, of ", place(w, r.input_product))};
      if (r.written.fences == now) refuse("an accumulator", "written", r.written.place);
      if (r.read.fences == now) refuse("an accumulator", "read", r.read.place);
      if (r.accumulated.fences == now && r.shape != shape)
        refuse("an accumulator", "used in another shape", r.accumulated.place);
    }
    for (const std::uint16_t i : op.reads) {
      const Register& r = registers[i];
      if (r.group && !r.moved) throw Fault{0, text("reads as A the accumulator in flight of ", place(w, r.product))};
      if (r.written.fences == now) refuse("a fragment of A", "written", r.written.place);
    }
  }
  for (const std::uint16_t i : op.writes) {
    Register& r = registers[i];
    r.group = group, r.product = w.pc - 1;
    r.moved = false;
    r.accumulated = {now, w.pc - 1};
    r.shape = shape;
  }
  for (const std::uint16_t i : op.reads) registers[i].input_group = group, registers[i].input_product = w.pc - 1;
}

void WarpgroupState::wait(Warp& w, std::uint32_t groups_left) {
  if (groups_left + 1 >= group) return;
  const std::uint32_t done = group - 1 - groups_left;
  for (Register& r : registers) {
    if (r.group <= done) r.group = 0;
    if (r.input_group <= done) r.input_group = 0;
  }
  std::erase_if(operands, [&](const Operands& o) {
    if (o.group > done) return false;
    w.block->shadow->end_read(o.read, Shadow::kWarp);
    return true;
  });
}

}  // namespace gpusim
