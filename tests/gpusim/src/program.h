// A kernel after decoding: compact operations over register slots, ready to run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ptx_ast.h"

namespace gpusim {

constexpr int kLanes = 32;
using Mask = std::uint32_t;  // one bit a lane
constexpr Mask kAllLanes = 0xffffffffu;

// Shared and local memory live in windows of the generic address space that no host pointer can hit (non-canonical
// addresses). Their low 32 bits are zero, so the address inside the window is the low half of a generic address.
constexpr std::uint64_t kSharedWindow = 0x0100'0000'0000'0000ull;
constexpr std::uint64_t kLocalWindow = 0x0200'0000'0000'0000ull;
constexpr std::uint32_t kSharedBase = 1024;  // shared memory does not start at address 0

enum class Space : std::uint8_t { generic, global, shared, local, param, constant };

// Classes of instructions, for the counters.
enum class Class : std::uint8_t {
  integer,
  float32,
  float64,
  half,
  conversion,
  special_function,
  tensor_core,
  move,
  load_global,
  store_global,
  load_shared,
  store_shared,
  matrix_load,
  other_memory,
  atomic,
  async_copy,
  control,
  synchronization,
  exchange,
  count
};

struct Warp;
struct Op;
using Handler = void (*)(Warp&, const Op&, Mask);
using Slot = std::uint32_t;  // byte offset of a register (32 lanes) in the register file of a warp

struct Op {
  Handler run = nullptr;
  Slot d = 0, a = 0, b = 0, c = 0;
  Slot guard = 0;              // predicate; slot 0 is always true
  Mask guard_flip = 0;         // all ones for @!p
  std::int64_t imm = 0;        // address offset, branch target, immediate of the instruction
  const Slot* list = nullptr;  // further operands
  const void* data = nullptr;  // whatever else an instruction needs
  Space space = Space::generic;
  std::uint8_t size = 0;     // bytes of one element in memory
  std::uint8_t count = 1;    // elements of a vector
  bool wide_address = true;  // the address register has 64 bits
  std::uint16_t mode = 0;    // meaning depends on the instruction
  std::uint16_t flags = 0;
};

// Op::flags from here on has the same meaning for all instructions.
constexpr std::uint16_t kOpSynchronizing = 0x8000;  // atomic, volatile or ordered: may meet another of its kind
constexpr std::uint16_t kOpAsyncProxy = 0x4000;     // reads or writes shared memory by the asynchronous proxy

struct OpInfo {
  int line = 0;  // in the PTX text
  ptx::SourceLine source;
  Class kind = Class::move;
  std::uint32_t tensor_flops = 0;
};

struct Constant {
  Slot slot;
  int width;
  std::uint64_t bits;
};

enum class Special : std::uint8_t {
  tid_x,
  tid_y,
  tid_z,
  ntid_x,
  ntid_y,
  ntid_z,
  ctaid_x,
  ctaid_y,
  ctaid_z,
  nctaid_x,
  nctaid_y,
  nctaid_z,
  laneid,
  warpid,
  nwarpid,
  smid,
  nsmid,
  gridid,
  lanemask_eq,
  lanemask_lt,
  lanemask_le,
  lanemask_gt,
  lanemask_ge,
  dynamic_smem_size,
  total_smem_size,
  zero,
  one,
  param_address
};

struct SpecialSlot {
  Slot slot;
  Special which;
  int width;
  std::uint64_t offset;  // added to the value
};

struct Parameter {
  std::uint32_t offset, bytes;
};

struct Module;
struct RegisterWatch;

struct Program {
  std::string name;
  const Module* module = nullptr;
  std::vector<Op> code;
  std::vector<OpInfo> info;
  std::vector<std::unique_ptr<Slot[]>> lists;
  std::vector<Constant> constants;
  std::vector<SpecialSlot> specials;
  std::vector<Parameter> params;
  std::uint32_t param_bytes = 0;
  std::uint32_t register_bytes = 0;
  std::uint32_t local_bytes = 0;    // a thread
  std::uint32_t static_shared = 0;  // bytes
  std::uint32_t dynamic_shared_offset = 0;
  int shared_granule_shift = 2;  // log2 of the smallest access to shared memory, at most 4 bytes
  int max_threads = 1024;
  int exact_threads = 0;                       // .reqntid; 0: any number
  int bounded_threads = 0;                     // .maxntid or .reqntid; 0: not said
  int min_blocks = 1;                          // on a multiprocessor
  int max_registers = 0;                       // .maxnreg, a thread; 0: not said
  bool async_proxy = false;                    // bulk copies or wgmma
  std::shared_ptr<const RegisterWatch> watch;  // registers of wgmma; null without wgmma
  int register_count = 0;                      // virtual registers, times their words
};

}  // namespace gpusim
