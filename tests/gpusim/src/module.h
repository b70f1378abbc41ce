// A loaded module: parsed PTX, its global variables in host memory, and kernels decoded when first used.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program.h"
#include "ptx_ast.h"

namespace gpusim {

struct Module {
  explicit Module(const std::string& ptx_text);

  // The kernel of this name, decoded. Throws when there is none or an instruction is not known.
  const Program& kernel(const std::string& name) const;

  const ptx::Function* function(const std::string& name) const;
  const ptx::Variable* variable(const std::string& name) const;
  std::byte* address_of(const std::string& variable_name) const;  // null when it is not a global or constant

  // "PTX line 12: add.s32 %r1, %r2, %r3; (file.cu:34)"
  std::string place(const Program& program, std::uint32_t pc) const;

  ptx::Module source;

 private:
  std::map<std::string, const ptx::Function*> functions_;
  std::map<std::string, const ptx::Variable*> variables_;
  std::map<std::string, std::unique_ptr<std::byte[]>> storage_;
  mutable std::map<std::string, std::unique_ptr<Program>> programs_;
  mutable std::mutex mutex_;
};

std::unique_ptr<Program> decode(const Module& module, const ptx::Function& entry);

}  // namespace gpusim
