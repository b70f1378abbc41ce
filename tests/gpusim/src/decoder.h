// Turns parsed instructions into operations. Each family of instructions has a file that fills an InstructionTable;
// its selectors ask the Decoder for modifiers and operands, and set the fields of the operation.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "half.h"
#include "module.h"
#include "program.h"
#include "register_plan.h"
#include "wgmma_registers.h"

namespace gpusim {

enum class Type : std::uint8_t {
  pred,
  b8,
  u8,
  s8,
  b16,
  u16,
  s16,
  f16,
  bf16,
  b32,
  u32,
  s32,
  f32,
  f16x2,
  bf16x2,
  tf32,
  b64,
  u64,
  s64,
  f64,
  b128,
  e4m3x2,
  e5m2x2
};

int width_of(Type type);
bool is_signed(Type type);
bool is_float(Type type);

class Decoder;
using Selector = void (*)(Decoder&);
using InstructionTable = std::unordered_map<std::string_view, Selector>;

// add, sub, mul, fma ... exist for several families of types
void add_arithmetic(InstructionTable&);
void integer_arithmetic(Decoder&);
void float_arithmetic(Decoder&);
void half_arithmetic(Decoder&);

void add_integer(InstructionTable&);
void add_logic(InstructionTable&);
void add_float(InstructionTable&);
void add_compare(InstructionTable&);
void add_convert(InstructionTable&);
void add_move(InstructionTable&);
void add_memory(InstructionTable&);
void add_atomic(InstructionTable&);
void add_control(InstructionTable&);
void add_warp(InstructionTable&);
void add_matrix(InstructionTable&);
void add_cp_async(InstructionTable&);
void add_mbarrier(InstructionTable&);
void add_wgmma(InstructionTable&);

// The state space named by the modifiers; generic when there is none.
Space take_space(Decoder&);

// Operations the decoder itself emits, or that several families use.
void warp_sync(Warp& warp, const Op& op, Mask m);
void branch_always(Warp& warp, const Op& op, Mask m);
void branch_if_equal(Warp& warp, const Op& op, Mask m);

class Decoder {
 public:
  // Without a plan every register gets a slot of its own.
  Decoder(const Module& module, Program& program, const RegisterPlan* plan)
      : module_(module), program_(program), plan_(plan) {}
  void run(const ptx::Function& entry);
  const RegisterLog& register_log() const { return log_; }

  // modifiers of the current instruction ---------------------------------------------------------------------------
  bool inside_call() const { return call_stack_.size() > 1; }
  const std::string& opcode() const { return now_->opcode[0]; }
  bool take(std::string_view modifier);
  const std::vector<std::string>& modifiers() const { return now_->opcode; }   // the opcode itself first
  std::string_view take_any(std::initializer_list<std::string_view> choices);  // "" when there is none
  Type take_type();                                                            // the next type; an error without one
  bool has_type() const;
  Type peek_type() const;  // the last type modifier
  Rounding take_rounding(Rounding otherwise = Rounding::nearest_even);
  void ignore(std::initializer_list<std::string_view> modifiers);  // no meaning in a functional model
  void take_cache_hints();
  bool opcode_has(std::string_view part) const;

  // operands of the current instruction ---------------------------------------------------------------------------
  std::size_t operand_count() const { return now_->operands.size(); }
  const ptx::Operand& operand(std::size_t i) const;
  Slot source(std::size_t i, int width) { return source(operand(i), width); }
  Slot source(std::size_t i, Type type) { return source(operand(i), width_of(type)); }
  Slot source(const ptx::Operand& operand, int width);
  Slot dest(std::size_t i, int width) { return dest(operand(i).name, width); }
  Slot dest(std::size_t i, Type type) { return dest(operand(i).name, width_of(type)); }
  Slot dest(const std::string& name, int width);
  Slot predicate(const std::string& name);  // "_" is a register nobody reads
  Slot constant(std::uint64_t bits, int width);
  int register_width(const ptx::Operand& operand, int otherwise);
  bool is_register(const std::string& name);
  void watch() { watched_.push_back(program_.code.size()); }  // of this instruction, a wgmma
  void address(std::size_t i, Slot* slot = nullptr);          // sets a, imm, wide_address; the space of a .param symbol
  std::vector<const ptx::Operand*> elements(std::size_t i) const;  // {a, b, c}, or the operand itself
  Slot* list(const std::vector<Slot>& slots);
  std::uint64_t immediate(std::size_t i) const;

  [[noreturn]] void fail(const std::string& what) const;

  Op op;  // being built
  Class kind = Class::move;
  std::uint32_t tensor_flops = 0;

  // Adds an operation beside the one being built (before it).
  void emit(const Op& extra);

 private:
  struct Register {
    Slot slot;
    int width;
    int id;  // in the log; -1: predicates are not in it
  };
  struct Memory {
    Space space;
    std::uint64_t address;
    bool dynamic = false;
  };
  struct Scope {
    std::map<std::string, Register> registers;
    std::map<std::string, std::pair<std::string, int>> families;  // "%r" with <n>
    std::map<std::string, Memory> memory;
    std::map<std::string, int> labels;  // name -> label id
    std::map<std::string, std::vector<std::string>> targets;
  };

  void function_body(const ptx::Function& f, std::vector<Scope> outer);
  void instruction(const ptx::Statement& s);
  void declare(const ptx::Variable& v);
  void call(const ptx::Statement& s);
  void builtin_call(const std::string& name, const std::vector<Memory>& results, const std::vector<Memory>& params);
  void indexed_branch(const ptx::Statement& s);
  Slot allocate(int width);
  Register new_register(int width);
  Slot sink(int width);
  void note(const Register& r, bool written);
  const Register* find_register(const std::string& name);
  const Memory* find_memory(const std::string& name);
  Memory shared_variable(const ptx::Variable& v);
  Memory local_variable(const ptx::Variable& v);
  int find_label(const std::string& name);
  bool special_register(const std::string& name, int width, Slot& slot);
  Slot special(Special which, int width, std::uint64_t offset = 0);
  void finish(const ptx::Statement& s, const Op& o);

  const Module& module_;
  Program& program_;
  const RegisterPlan* plan_;
  RegisterLog log_;
  std::vector<RegisterLog::Touch> touched_;  // by the current instruction
  std::map<int, Slot> sinks_;                // what nobody reads, by width
  std::vector<Scope> scopes_;
  std::size_t function_scope_ = 0;  // where the function being decoded begins
  const ptx::Statement* now_ = nullptr;
  std::vector<bool> taken_;
  std::map<std::pair<std::uint64_t, int>, Slot> constants_;
  std::map<std::pair<int, std::uint64_t>, Slot> specials_;
  std::map<std::string, Memory> shared_;             // module-scope shared variables in use
  std::vector<std::size_t> dynamic_constants_;       // constants that hold the address of dynamic shared memory
  std::vector<int> label_at_;                        // label id -> operation
  std::vector<std::pair<std::size_t, int>> fixups_;  // operation, label
  std::vector<std::string> call_stack_;
  std::vector<RegisterUse> used_;     // registers the current instruction names
  RegisterUses uses_;                 // of every operation
  std::vector<std::size_t> watched_;  // operations whose registers are in flight after them
  int end_label_ = -1;                // where `ret` of an inlined function goes
};

}  // namespace gpusim
