// The text of a PTX module as data: functions, variables and instructions, before any meaning is given to them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gpusim::ptx {

struct Operand {
  enum class Kind { name, integer, real32, real64, list, address };
  Kind kind = Kind::name;
  bool negated = false;        // "!%p1"
  std::string name;            // a register, variable, label or function; the base of an address; "" for a plain number
  std::string second;          // "%p2" in "%p1|%p2"
  std::uint64_t bits = 0;      // integer value, or the bits of a real
  std::int64_t offset = 0;     // [name + offset]
  std::vector<Operand> parts;  // of a list; of an address: the coordinates in [map, {c0, c1}]
};

struct Variable {
  std::string space;  // reg, local, shared, global, const, param
  std::string type;   // b8, u32, f64, pred, ...
  std::string name;
  int align = 0;
  bool external = false;
  std::uint64_t elements = 1;  // 0: an array without a size (dynamic shared memory)
  int count = 0;               // .reg %r<count>; 0: one register called `name`
  struct Initial {
    std::uint64_t bits = 0;
    std::string symbol;  // the address of this symbol, plus bits
  };
  std::vector<Initial> initial;
};

struct SourceLine {
  int file = 0, line = 0;
  int caller_file = 0, caller_line = 0;  // where an inlined function was called
};

struct Statement {
  enum class Kind { instruction, label, open, close, variable, targets };
  Kind kind = Kind::instruction;
  int line = 0;                     // of the PTX text
  SourceLine source;                // from .loc
  std::string name;                 // whole opcode "add.s32"; or a label
  std::vector<std::string> opcode;  // its parts between dots
  std::string guard;                // predicate register, or ""
  bool guard_negated = false;
  std::vector<Operand> operands;
  Variable variable;
};

struct Function {
  std::string name;
  bool entry = false;
  bool defined = false;
  int line = 0;
  std::vector<Variable> results, params;
  std::map<std::string, std::vector<std::uint64_t>> directives;  // maxntid, minnctapersm, ...
  std::vector<Statement> body;
};

struct Module {
  std::string target;  // sm_90a
  std::vector<Variable> variables;
  std::vector<Function> functions;
  std::map<int, std::string> files;  // .file
  std::vector<std::string> lines;    // the text, for messages
};

// Parses a whole module. Throws std::runtime_error with the line where the text is not understood.
Module parse(const std::string& text);

int bytes_of_type(const std::string& type);

}  // namespace gpusim::ptx
