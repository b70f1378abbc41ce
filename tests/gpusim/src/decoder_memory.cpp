// The part of the decoder that gives variables their places and binds the parameters of functions, which are
// decoded in place at every call.
#include <algorithm>
#include <cstring>

#include "builtin.h"
#include "decoder.h"
#include "fault.h"

namespace gpusim {

namespace {
constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t to) { return to ? (n + to - 1) / to * to : n; }
}  // namespace

void Decoder::declare(const ptx::Variable& v) {
  Scope& scope = scopes_.back();
  if (v.space == "reg") {
    const int width = v.type == "pred" ? 1 : ptx::bytes_of_type(v.type);
    if (v.count)
      scope.families[v.name] = {v.type, v.count};
    else
      scope.registers[v.name] = new_register(width);
  } else if (v.space == "shared") {
    scope.memory[v.name] = shared_variable(v);
  } else if (v.space == "local" || v.space == "param") {
    scope.memory[v.name] = local_variable(v);
  } else {
    fail("a variable in ." + v.space + " inside a function");
  }
}

Decoder::Memory Decoder::shared_variable(const ptx::Variable& v) {
  if (const auto found = shared_.find(v.name); found != shared_.end()) return found->second;
  Memory memory{Space::shared, kSharedBase, v.external || v.elements == 0};
  if (!memory.dynamic) {
    program_.static_shared = static_cast<std::uint32_t>(round_up(program_.static_shared, v.align));
    memory.address += program_.static_shared;
    program_.static_shared += static_cast<std::uint32_t>(ptx::bytes_of_type(v.type) * v.elements);
  }
  return shared_[v.name] = memory;
}

Decoder::Memory Decoder::local_variable(const ptx::Variable& v) {
  program_.local_bytes = static_cast<std::uint32_t>(round_up(program_.local_bytes, std::max(v.align, 1)));
  const Memory memory{Space::local, program_.local_bytes};
  program_.local_bytes += static_cast<std::uint32_t>(ptx::bytes_of_type(v.type) * v.elements);
  return memory;
}

const Decoder::Memory* Decoder::find_memory(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (const auto found = scope->memory.find(name); found != scope->memory.end()) return &found->second;
  }
  Scope& outermost = scopes_.front();
  if (const ptx::Variable* v = module_.variable(name)) {
    if (v->space == "shared") return &(outermost.memory[name] = shared_variable(*v));
    if (std::byte* at = module_.address_of(name)) {
      const Space space = v->space == "const" ? Space::constant : Space::global;
      return &(outermost.memory[name] = {space, reinterpret_cast<std::uint64_t>(at)});
    }
  }
  return nullptr;
}

// call (results), function, (parameters): the body of the function is decoded here, with its parameters bound to the
// memory of the caller's.
void Decoder::call(const ptx::Statement& s) {
  std::vector<Memory> results, params;
  const ptx::Operand* callee = nullptr;
  const auto memories = [&](const ptx::Operand& list, std::vector<Memory>& out) {
    for (const ptx::Operand& part : list.parts) {
      const Memory* m = find_memory(part.name);
      if (!m) fail("the argument '" + part.name + "' of a call is not a .param variable");
      out.push_back(*m);
    }
  };
  for (const ptx::Operand& o : s.operands) {
    if (o.kind == ptx::Operand::Kind::list)
      memories(o, callee ? params : results);
    else if (!callee)
      callee = &o;
  }
  if (!callee) fail("a call without a function");
  const ptx::Function* f = module_.function(callee->name);
  if (!f && is_register(callee->name)) fail("indirect calls are not known to the simulator");
  if (!f || !f->defined) return builtin_call(callee->name, results, params);
  if (std::count(call_stack_.begin(), call_stack_.end(), f->name)) fail("recursion is not known to the simulator");
  if (results.size() != f->results.size() || params.size() != f->params.size())
    fail("a call with the wrong number of arguments");

  int skip = -1;
  if (op.guard) {  // a guarded call: jump over the body
    skip = static_cast<int>(label_at_.size());
    label_at_.push_back(-1);
    op.run = branch_always;
    op.guard_flip = ~op.guard_flip;
    kind = Class::control;
    fixups_.emplace_back(program_.code.size(), skip);
    finish(s, op);
  }
  Scope scope;
  for (std::size_t i = 0; i < results.size(); ++i) scope.memory[f->results[i].name] = results[i];
  for (std::size_t i = 0; i < params.size(); ++i) scope.memory[f->params[i].name] = params[i];
  function_body(*f, {scope});
  now_ = &s;
  if (skip >= 0) label_at_[skip] = static_cast<int>(program_.code.size());
}

void Decoder::builtin_call(const std::string& name, const std::vector<Memory>& results,
                           const std::vector<Memory>& params) {
  const Handler handler = find_builtin(name);
  if (!handler) fail("the function '" + name + "' is not defined in this module");
  std::vector<Slot> slots;
  for (const Memory& m : results) slots.push_back(constant(m.address, 4));
  for (const Memory& m : params) slots.push_back(constant(m.address, 4));
  op.run = handler;
  op.list = list(slots);
  kind = Class::control;
  finish(*now_, op);
}

}  // namespace gpusim
