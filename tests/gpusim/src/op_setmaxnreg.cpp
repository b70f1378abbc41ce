// setmaxnreg: warps of a block give registers back to its pool, and others take them. A kernel begins with what its
// directives say; without any, nothing is known of the pool and the instruction does nothing.
#include "async.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

// op.imm: registers a thread will have. ptxas refuses a dec that takes and an inc that gives.
void set_registers(Warp& w, const Op& op, Mask) {
  if (!w.gather(w.live)) return;
  if (w.registers == 0) return;
  Block& block = *w.block;
  const auto wanted = static_cast<int>(op.imm);
  const int more = wanted - w.registers;
  if (more * kLanes > block.free_registers) {
    return w.block_on(
        text("registers: it asks for ", more * kLanes, " more, the pool of the block has ", block.free_registers));
  }
  block.free_registers -= more * kLanes;
  w.registers = wanted;
  block.notify();
}

}  // namespace

void select_setmaxnreg(Decoder& d) {
  d.ignore({"inc", "dec", "sync", "aligned", "u32"});
  d.op.imm = static_cast<std::int64_t>(d.immediate(0));
  if (d.op.imm < 24 || d.op.imm > 256 || d.op.imm % 8) d.fail("setmaxnreg takes multiples of 8 from 24 to 256");
  d.kind = Class::control;
  d.op.run = set_registers;
}

}  // namespace gpusim
