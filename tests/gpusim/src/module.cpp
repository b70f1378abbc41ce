#include "module.h"

#include <cstring>

#include "fault.h"
#include "memory.h"

namespace gpusim {

Module::Module(const std::string& ptx_text) : source(ptx::parse(ptx_text)) {
  for (const ptx::Function& f : source.functions) {
    const ptx::Function*& known = functions_[f.name];
    if (!known || f.defined) known = &f;
  }
  for (const ptx::Variable& v : source.variables) {
    variables_[v.name] = &v;
    if (v.space != "global" && v.space != "const") continue;
    const std::size_t bytes = ptx::bytes_of_type(v.type) * v.elements;
    auto& memory = storage_[v.name];
    memory.reset(new std::byte[bytes + 256]());
    register_memory(address_of(v.name), bytes, v.name.c_str());
  }
  for (const ptx::Variable& v : source.variables) {
    if (!storage_.count(v.name)) continue;
    const int size = ptx::bytes_of_type(v.type);
    std::byte* to = address_of(v.name);
    for (const ptx::Variable::Initial& initial : v.initial) {
      std::uint64_t value = initial.bits;
      if (!initial.symbol.empty()) value += reinterpret_cast<std::uint64_t>(address_of(initial.symbol));
      std::memcpy(to, &value, size);
      to += size;
    }
  }
}

std::byte* Module::address_of(const std::string& name) const {
  const auto found = storage_.find(name);
  if (found == storage_.end()) return nullptr;
  const auto base = reinterpret_cast<std::uintptr_t>(found->second.get());
  return found->second.get() + ((base + 255) / 256 * 256 - base);
}

const ptx::Function* Module::function(const std::string& name) const {
  const auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : found->second;
}

const ptx::Variable* Module::variable(const std::string& name) const {
  const auto found = variables_.find(name);
  return found == variables_.end() ? nullptr : found->second;
}

const Program& Module::kernel(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  auto& program = programs_[name];
  if (!program) {
    const ptx::Function* f = function(name);
    if (!f || !f->entry) throw Error("no kernel '" + name + "' in this module");
    program = decode(*this, *f);
  }
  return *program;
}

std::string Module::place(const Program& program, std::uint32_t pc) const {
  if (pc >= program.info.size()) return "the end of the kernel";
  const OpInfo& info = program.info[pc];
  std::string shown;
  if (info.line > 0 && info.line <= static_cast<int>(source.lines.size())) {
    for (const char c : source.lines[info.line - 1]) {
      if (!(shown.empty() && (c == ' ' || c == '\t'))) shown += c == '\t' ? ' ' : c;
    }
  }
  std::string result = text("PTX line ", info.line, ": ", shown);
  const auto name = [&](int file, int line) {
    const auto found = source.files.find(file);
    return found == source.files.end() ? std::string() : text(found->second, ":", line);
  };
  const std::string here = name(info.source.file, info.source.line);
  const std::string caller = name(info.source.caller_file, info.source.caller_line);
  if (!here.empty()) result += " (" + here + (caller.empty() ? "" : ", called from " + caller) + ")";
  return result;
}

}  // namespace gpusim
