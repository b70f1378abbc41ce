#include "decoder.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "fault.h"

namespace gpusim {

namespace {

const std::unordered_map<std::string_view, Type>& type_names() {
  static const std::unordered_map<std::string_view, Type> names = {
      {"pred", Type::pred}, {"b8", Type::b8},         {"u8", Type::u8},         {"s8", Type::s8},
      {"b16", Type::b16},   {"u16", Type::u16},       {"s16", Type::s16},       {"f16", Type::f16},
      {"bf16", Type::bf16}, {"b32", Type::b32},       {"u32", Type::u32},       {"s32", Type::s32},
      {"f32", Type::f32},   {"f16x2", Type::f16x2},   {"bf16x2", Type::bf16x2}, {"tf32", Type::tf32},
      {"b64", Type::b64},   {"u64", Type::u64},       {"s64", Type::s64},       {"f64", Type::f64},
      {"b128", Type::b128}, {"e4m3x2", Type::e4m3x2}, {"e5m2x2", Type::e5m2x2}};
  return names;
}

const InstructionTable& instruction_table() {
  static const InstructionTable table = [] {
    InstructionTable t;
    for (auto add : {add_arithmetic, add_integer, add_logic, add_float, add_compare, add_convert, add_move, add_memory,
                     add_atomic, add_control, add_warp, add_matrix, add_cp_async, add_mbarrier, add_wgmma}) {
      add(t);
    }
    return t;
  }();
  return table;
}

constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t to) { return to ? (n + to - 1) / to * to : n; }

constexpr Slot kFirstSlot = 128;  // slot 0: the predicate that is always true

}  // namespace

int width_of(Type type) {
  switch (type) {
    case Type::pred: return 1;
    case Type::b8:
    case Type::u8:
    case Type::s8: return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
    case Type::e4m3x2:
    case Type::e5m2x2: return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64: return 8;
    case Type::b128: return 16;
    default: return 4;
  }
}

bool is_signed(Type type) { return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64; }

bool is_float(Type type) {
  return type == Type::f16 || type == Type::bf16 || type == Type::f32 || type == Type::f64 || type == Type::tf32;
}

std::unique_ptr<Program> decode(const Module& module, const ptx::Function& entry) {
  const auto decoded = [&](Program& program, const RegisterPlan* plan) {
    program.name = entry.name;
    program.module = &module;
    Decoder decoder(module, program, plan);
    decoder.run(entry);
    return decoder.register_log();
  };
  Program draft;
  const RegisterLog log = decoded(draft, nullptr);
  const RegisterPlan plan = plan_registers(draft, log, kFirstSlot);
  auto program = std::make_unique<Program>();
  decoded(*program, &plan);
  return program;
}

void Decoder::fail(const std::string& what) const {
  const int line = now_ ? now_->line : 0;
  std::string shown = now_ ? now_->name : "";
  if (line > 0 && line <= static_cast<int>(module_.source.lines.size())) shown = module_.source.lines[line - 1];
  throw Error(text("kernel ", program_.name, ": ", what, "\n  at PTX line ", line, ": ", shown));
}

// the kernel ------------------------------------------------------------------------------------------------------

void Decoder::run(const ptx::Function& entry) {
  program_.register_bytes = plan_ ? plan_->end : kFirstSlot;
  program_.constants.push_back({0, 1, kAllLanes});
  Scope outer;
  std::uint32_t offset = 0;
  for (const ptx::Variable& p : entry.params) {
    const auto bytes = static_cast<std::uint32_t>(ptx::bytes_of_type(p.type) * p.elements);
    offset = static_cast<std::uint32_t>(round_up(offset, p.align));
    program_.params.push_back({offset, bytes});
    outer.memory[p.name] = {Space::param, offset};
    offset += bytes;
  }
  program_.param_bytes = offset;
  const auto directive = [&](const char* name, int otherwise) {
    const auto found = entry.directives.find(name);
    if (found == entry.directives.end()) return otherwise;
    int product = 1;
    for (const std::uint64_t n : found->second) product *= static_cast<int>(n);
    return product;
  };
  program_.exact_threads = directive("reqntid", 0);
  program_.bounded_threads = directive("maxntid", program_.exact_threads);
  program_.max_threads = program_.bounded_threads ? program_.bounded_threads : 1024;
  program_.max_registers = directive("maxnreg", 0);
  program_.min_blocks = std::max(directive("minnctapersm", 1), 1);
  function_body(entry, {outer});
  Op exit;  // a body may end without ret
  ptx::Statement end;
  end.name = "exit";
  end.opcode = {"exit"};
  end.line = entry.line;
  instruction(end);
  for (const auto& [at, label] : fixups_) {
    if (label_at_[label] < 0) fail("a label that is used is not defined");
    program_.code[at].imm = label_at_[label];
  }
  if (plan_ && !watched_.empty()) program_.watch = watch_registers(program_.code, uses_, watched_);
  program_.dynamic_shared_offset = static_cast<std::uint32_t>(round_up(program_.static_shared, 16));
  for (const auto& [name, memory] : shared_) {
    if (memory.dynamic) {
      const auto align = std::max<std::uint64_t>(16, module_.variable(name) ? module_.variable(name)->align : 16);
      program_.dynamic_shared_offset = static_cast<std::uint32_t>(round_up(program_.dynamic_shared_offset, align));
    }
  }
  for (const std::size_t i : dynamic_constants_) program_.constants[i].bits += program_.dynamic_shared_offset;
}

// Decodes the body of a function in place. `outer` holds what its parameters are bound to.
void Decoder::function_body(const ptx::Function& f, std::vector<Scope> outer) {
  const std::vector<Scope> saved_scopes = std::move(scopes_);
  const int saved_end = end_label_;
  scopes_ = std::move(outer);
  call_stack_.push_back(f.name);
  if (call_stack_.size() > 1) {
    end_label_ = static_cast<int>(label_at_.size());
    label_at_.push_back(-1);
  }
  const auto open_scope = [&](std::size_t first) {
    Scope scope;
    int depth = 0;
    for (std::size_t i = first; i < f.body.size() && depth >= 0; ++i) {
      const ptx::Statement& s = f.body[i];
      if (s.kind == ptx::Statement::Kind::open) ++depth;
      if (s.kind == ptx::Statement::Kind::close) --depth;
      if (depth != 0) continue;
      if (s.kind == ptx::Statement::Kind::label) {
        scope.labels[s.name] = static_cast<int>(label_at_.size());
        label_at_.push_back(-1);
      } else if (s.kind == ptx::Statement::Kind::targets) {
        for (const ptx::Operand& o : s.operands) scope.targets[s.name].push_back(o.name);
      }
    }
    scopes_.push_back(std::move(scope));
  };
  open_scope(0);
  for (std::size_t i = 0; i < f.body.size(); ++i) {
    const ptx::Statement& s = f.body[i];
    now_ = &s;
    switch (s.kind) {
      case ptx::Statement::Kind::open: open_scope(i + 1); break;
      case ptx::Statement::Kind::close: scopes_.pop_back(); break;
      case ptx::Statement::Kind::variable: declare(s.variable); break;
      case ptx::Statement::Kind::label: label_at_[find_label(s.name)] = static_cast<int>(program_.code.size()); break;
      case ptx::Statement::Kind::targets: break;
      case ptx::Statement::Kind::instruction: instruction(s); break;
    }
  }
  if (call_stack_.size() > 1) label_at_[end_label_] = static_cast<int>(program_.code.size());
  call_stack_.pop_back();
  end_label_ = saved_end;
  scopes_ = saved_scopes;
}

void Decoder::instruction(const ptx::Statement& s) {
  now_ = &s;
  touched_.clear();
  op = Op{};
  kind = Class::move;
  tensor_flops = 0;
  used_.clear();
  taken_.assign(s.opcode.size(), false);
  taken_[0] = true;
  if (!s.guard.empty()) {
    op.guard = predicate(s.guard);
    op.guard_flip = s.guard_negated ? kAllLanes : 0;
  }
  const std::string& name = s.opcode[0];
  if (name == "call") return call(s);
  if (name == "brx") return indexed_branch(s);
  const auto found = instruction_table().find(name);
  if (found == instruction_table().end()) fail("the instruction '" + s.name + "' is not known to the simulator");
  found->second(*this);
  for (std::size_t i = 0; i < taken_.size(); ++i) {
    if (!taken_[i]) fail("'." + s.opcode[i] + "' of the instruction '" + s.name + "' is not known to the simulator");
  }
  const bool jumps = name == "bra" || (name == "ret" && call_stack_.size() > 1);
  if (jumps) {
    const int label = name == "ret" ? end_label_ : find_label(operand(0).name);
    fixups_.emplace_back(program_.code.size(), label);
  }
  finish(s, op);
}

void Decoder::emit(const Op& extra) { finish(*now_, extra); }

void Decoder::finish(const ptx::Statement& s, const Op& o) {
  if ((o.space == Space::shared || o.space == Space::generic) && o.size > 0 &&
      (kind == Class::load_shared || kind == Class::store_shared || kind == Class::load_global ||
       kind == Class::store_global || kind == Class::atomic)) {
    program_.shared_granule_shift =
        std::min(program_.shared_granule_shift, static_cast<int>(std::countr_zero(unsigned{o.size})));
  }
  if (o.flags & kOpAsyncProxy) program_.async_proxy = true;
  const bool copy = s.opcode[0] == "mov" && used_.size() == 2 && used_[0].writes != used_[1].writes &&
                    s.operands.size() == 2 && s.operands[0].kind == ptx::Operand::Kind::name &&
                    s.operands[1].kind == ptx::Operand::Kind::name;
  uses_.registers.insert(uses_.registers.end(), used_.begin(), used_.end());
  uses_.ends.push_back(static_cast<std::uint32_t>(uses_.registers.size()));
  uses_.copies.push_back(copy);
  for (RegisterLog::Touch touch : touched_) {
    touch.op = static_cast<std::uint32_t>(program_.code.size());
    log_.touches.push_back(touch);
    if (s.opcode[0] == "wgmma") log_.alone[touch.id] = true;
  }
  if (copy && touched_.size() == 2) log_.copies.emplace_back(touched_[0].id, touched_[1].id);
  program_.code.push_back(o);
  program_.info.push_back({s.line, s.source, kind, tensor_flops});
}

// brx.idx: one guarded comparison and branch for each target.
void Decoder::indexed_branch(const ptx::Statement& s) {
  const Slot index = source(0, 4);
  std::vector<std::string> names;
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend() && names.empty(); ++scope) {
    if (const auto found = scope->targets.find(operand(1).name); found != scope->targets.end()) names = found->second;
  }
  if (names.empty()) fail("no table of branch targets '" + operand(1).name + "'");
  const Op guard = op;
  for (std::size_t i = 0; i < names.size(); ++i) {
    op = guard;
    op.run = branch_if_equal;
    op.a = index;
    op.b = constant(i, 4);
    kind = Class::control;
    fixups_.emplace_back(program_.code.size(), find_label(names[i]));
    finish(s, op);
  }
}

// modifiers -------------------------------------------------------------------------------------------------------

bool Decoder::take(std::string_view modifier) {
  for (std::size_t i = 1; i < taken_.size(); ++i) {
    if (!taken_[i] && now_->opcode[i] == modifier) return taken_[i] = true;
  }
  return false;
}

bool Decoder::opcode_has(std::string_view part) const {
  return std::find(now_->opcode.begin(), now_->opcode.end(), part) != now_->opcode.end();
}

std::string_view Decoder::take_any(std::initializer_list<std::string_view> choices) {
  for (const std::string_view choice : choices) {
    if (take(choice)) return choice;
  }
  return "";
}

void Decoder::ignore(std::initializer_list<std::string_view> modifiers) {
  for (const std::string_view modifier : modifiers) take(modifier);
}

void Decoder::take_cache_hints() {
  for (std::size_t i = 1; i < taken_.size(); ++i) {
    const std::string& part = now_->opcode[i];
    for (const char* prefix : {"L1::", "L2::", "level::"}) taken_[i] = taken_[i] || part.rfind(prefix, 0) == 0;
  }
  ignore({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
}

bool Decoder::has_type() const {
  for (std::size_t i = 1; i < taken_.size(); ++i) {
    if (!taken_[i] && type_names().count(now_->opcode[i])) return true;
  }
  return false;
}

Type Decoder::peek_type() const {
  for (std::size_t i = now_->opcode.size(); i-- > 1;) {
    if (const auto found = type_names().find(now_->opcode[i]); found != type_names().end()) return found->second;
  }
  fail("the instruction '" + now_->name + "' lacks a type");
}

Type Decoder::take_type() {
  for (std::size_t i = 1; i < taken_.size(); ++i) {
    if (taken_[i]) continue;
    if (const auto found = type_names().find(now_->opcode[i]); found != type_names().end()) {
      taken_[i] = true;
      return found->second;
    }
  }
  fail("the instruction '" + now_->name + "' lacks a type");
}

Rounding Decoder::take_rounding(Rounding otherwise) {
  if (take("rn") || take("rni")) return Rounding::nearest_even;
  if (take("rz") || take("rzi")) return Rounding::zero;
  if (take("rm") || take("rmi")) return Rounding::down;
  if (take("rp") || take("rpi")) return Rounding::up;
  if (take("rna")) return Rounding::nearest_away;
  return otherwise;
}

}  // namespace gpusim
