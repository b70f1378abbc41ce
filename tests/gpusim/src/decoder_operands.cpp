// The part of the decoder that turns operands into register slots: registers, constants, special registers, addresses.
#include <algorithm>
#include <bit>
#include <cctype>

#include "decoder.h"
#include "fault.h"

namespace gpusim {

const ptx::Operand& Decoder::operand(std::size_t i) const {
  if (i >= now_->operands.size()) fail("too few operands");
  return now_->operands[i];
}

std::vector<const ptx::Operand*> Decoder::elements(std::size_t i) const {
  std::vector<const ptx::Operand*> result;
  if (operand(i).kind != ptx::Operand::Kind::list) return {&operand(i)};
  for (const ptx::Operand& part : operand(i).parts) result.push_back(&part);
  return result;
}

std::uint64_t Decoder::immediate(std::size_t i) const {
  if (operand(i).kind != ptx::Operand::Kind::integer) fail("expected a number");
  return operand(i).bits;
}

Slot* Decoder::list(const std::vector<Slot>& slots) {
  program_.lists.push_back(std::make_unique<Slot[]>(slots.size() + 1));
  std::copy(slots.begin(), slots.end(), program_.lists.back().get());
  return program_.lists.back().get();
}

Slot Decoder::allocate(int width) {
  if (width > 1) program_.register_bytes = (program_.register_bytes + 63) & ~63u;  // rows begin with a cache line
  const Slot slot = program_.register_bytes;
  program_.register_bytes += width == 1 ? sizeof(Mask) : kLanes * width;
  program_.register_count += width > 4 ? width / 4 : 1;
  return slot;
}

Decoder::Register Decoder::new_register(int width) {
  if (width == 1) return {allocate(width), width, -1};
  const auto id = static_cast<int>(log_.widths.size());
  log_.widths.push_back(width);
  log_.alone.push_back(false);
  if (!plan_) return {allocate(width), width, id};
  program_.register_count += width > 4 ? width / 4 : 1;
  return {plan_->slots[id], width, id};
}

void Decoder::note(const Register& r, bool written) {
  used_.push_back({r.slot, static_cast<std::uint8_t>(r.width), written});
  if (r.id >= 0) touched_.push_back({0, static_cast<std::uint32_t>(r.id), written});
}

const Decoder::Register* Decoder::find_register(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->registers.find(name); found != scope->registers.end()) return &found->second;
    std::size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    for (std::size_t cut = digits; cut < name.size(); ++cut) {
      const auto family = scope->families.find(name.substr(0, cut));
      if (family == scope->families.end()) continue;
      if (std::stoi(name.substr(cut)) >= family->second.second) continue;
      const int width = family->second.first == "pred" ? 1 : ptx::bytes_of_type(family->second.first);
      return &(scope->registers[name] = new_register(width));
    }
  }
  return nullptr;
}

bool Decoder::is_register(const std::string& name) { return find_register(name) != nullptr; }

int Decoder::register_width(const ptx::Operand& o, int otherwise) {
  if (o.kind != ptx::Operand::Kind::name) return otherwise;
  const Register* r = find_register(o.name);
  return r ? r->width : otherwise;
}

Slot Decoder::sink(int width) {
  Slot& slot = sinks_[width];
  if (slot == 0) slot = allocate(width);
  return slot;
}

Slot Decoder::dest(const std::string& name, int width) {
  if (name == "_") return sink(width);
  const Register* r = find_register(name);
  if (!r) fail("'" + name + "' is not a register");
  if (r->width != width) fail(text("'", name, "' has ", r->width * 8, " bits, the instruction writes ", width * 8));
  note(*r, true);
  return r->slot;
}

Slot Decoder::predicate(const std::string& name) {
  if (name == "_" || name.empty()) return sink(1);
  const Register* r = find_register(name);
  if (!r || r->width != 1) fail("'" + name + "' is not a predicate");
  return r->slot;
}

Slot Decoder::source(const ptx::Operand& o, int width) {
  using Kind = ptx::Operand::Kind;
  if (o.kind == Kind::integer) return constant(width == 1 ? (o.bits ? kAllLanes : 0) : o.bits, width);
  if (o.kind == Kind::real32 || o.kind == Kind::real64) {
    if (o.kind == Kind::real64 && width == 4) {
      const auto value = static_cast<float>(std::bit_cast<double>(o.bits));
      return constant(std::bit_cast<std::uint32_t>(value), 4);
    }
    if (o.kind == Kind::real32 && width == 8) {
      const double value = std::bit_cast<float>(static_cast<std::uint32_t>(o.bits));
      return constant(std::bit_cast<std::uint64_t>(value), 8);
    }
    return constant(o.bits, width);
  }
  if (o.kind != Kind::name) fail("an operand has the wrong form");
  if (const Register* r = find_register(o.name)) {
    if (r->width != width) fail(text("'", o.name, "' has ", r->width * 8, " bits, the instruction reads ", width * 8));
    note(*r, false);
    return r->slot;
  }
  if (Slot slot; special_register(o.name, width, slot)) return slot;
  if (const Memory* m = find_memory(o.name)) {
    const std::uint64_t address = m->address + static_cast<std::uint64_t>(o.offset);
    if (m->space == Space::param) return special(Special::param_address, width, address);
    if (!m->dynamic) return constant(address, width);
    const Slot slot = allocate(width);
    dynamic_constants_.push_back(program_.constants.size());
    program_.constants.push_back({slot, width, address});
    return slot;
  }
  fail("'" + o.name + "' is not a register, variable or special register the simulator knows");
}

Slot Decoder::constant(std::uint64_t bits, int width) {
  if (width == 2) bits &= 0xffff;
  if (width == 4) bits &= 0xffffffff;
  auto& slot = constants_[{bits, width}];
  if (slot == 0) {
    slot = allocate(width);
    program_.constants.push_back({slot, width, bits});
  }
  return slot;
}

void Decoder::address(std::size_t i, Slot* slot) {
  const ptx::Operand& o = operand(i);
  if (o.kind != ptx::Operand::Kind::address) fail("expected an address in brackets");
  ptx::Operand base = o;
  base.kind = o.name.empty() ? ptx::Operand::Kind::integer : ptx::Operand::Kind::name;
  base.offset = 0;
  const int width = register_width(base, 8);
  op.wide_address = width == 8;
  op.imm = o.offset;
  if (!find_register(base.name)) {
    if (const Memory* m = find_memory(base.name); m && op.space == Space::param) op.space = m->space;
  }
  (slot ? *slot : op.a) = source(base, width);
}

bool Decoder::special_register(const std::string& name, int width, Slot& slot) {
  static const std::map<std::string, Special> names = {{"%tid.x", Special::tid_x},
                                                       {"%tid.y", Special::tid_y},
                                                       {"%tid.z", Special::tid_z},
                                                       {"%ntid.x", Special::ntid_x},
                                                       {"%ntid.y", Special::ntid_y},
                                                       {"%ntid.z", Special::ntid_z},
                                                       {"%ctaid.x", Special::ctaid_x},
                                                       {"%ctaid.y", Special::ctaid_y},
                                                       {"%ctaid.z", Special::ctaid_z},
                                                       {"%nctaid.x", Special::nctaid_x},
                                                       {"%nctaid.y", Special::nctaid_y},
                                                       {"%nctaid.z", Special::nctaid_z},
                                                       {"%laneid", Special::laneid},
                                                       {"%warpid", Special::warpid},
                                                       {"%nwarpid", Special::nwarpid},
                                                       {"%smid", Special::smid},
                                                       {"%nsmid", Special::nsmid},
                                                       {"%gridid", Special::gridid},
                                                       {"%lanemask_eq", Special::lanemask_eq},
                                                       {"%lanemask_lt", Special::lanemask_lt},
                                                       {"%lanemask_le", Special::lanemask_le},
                                                       {"%lanemask_gt", Special::lanemask_gt},
                                                       {"%lanemask_ge", Special::lanemask_ge},
                                                       {"%dynamic_smem_size", Special::dynamic_smem_size},
                                                       {"%total_smem_size", Special::total_smem_size},
                                                       // a cluster of one block
                                                       {"%cluster_ctaid.x", Special::zero},
                                                       {"%cluster_ctaid.y", Special::zero},
                                                       {"%cluster_ctaid.z", Special::zero},
                                                       {"%cluster_ctarank", Special::zero},
                                                       {"%cluster_nctaid.x", Special::one},
                                                       {"%cluster_nctaid.y", Special::one},
                                                       {"%cluster_nctaid.z", Special::one},
                                                       {"%cluster_nctarank", Special::one},
                                                       {"%clusterid.x", Special::ctaid_x},
                                                       {"%clusterid.y", Special::ctaid_y},
                                                       {"%clusterid.z", Special::ctaid_z},
                                                       {"%nclusterid.x", Special::nctaid_x},
                                                       {"%nclusterid.y", Special::nctaid_y},
                                                       {"%nclusterid.z", Special::nctaid_z}};
  if (name == "WARP_SZ") {
    slot = constant(kLanes, width);
    return true;
  }
  const auto found = names.find(name);
  if (found == names.end()) return false;
  slot = special(found->second, width);
  return true;
}

Slot Decoder::special(Special which, int width, std::uint64_t offset) {
  auto& slot = specials_[{static_cast<int>(which) * 16 + width, offset}];
  if (slot == 0) {
    slot = allocate(width);
    program_.specials.push_back({slot, which, width, offset});
  }
  return slot;
}

int Decoder::find_label(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->labels.find(name); found != scope->labels.end()) return found->second;
  }
  fail("no label '" + name + "'");
}

}  // namespace gpusim
