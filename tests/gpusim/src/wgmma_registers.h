// The registers of wgmma are in flight from the instruction to its wait: accumulators may not be touched, fragments of
// A not be written; and what threads did to them before is ordered by wgmma.fence. The decoder finds the registers
// concerned and puts watched() in front of the operations that name them, so that other kernels pay nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "program.h"

namespace gpusim {

// What the decoder notes of every operation: the registers it names, one operation after the other.
struct RegisterUse {
  Slot slot;
  std::uint8_t width;
  bool writes;
};
struct RegisterUses {
  std::vector<RegisterUse> registers;
  std::vector<std::uint32_t> ends;  // of each operation
  std::vector<bool> copies;         // the operation is a mov of one register to another

  std::span<const RegisterUse> of(std::size_t operation) const {
    const std::uint32_t begin = operation ? ends[operation - 1] : 0;
    return {registers.data() + begin, ends[operation] - begin};
  }
};

// An operation that names registers of wgmma, by their numbers.
struct WatchedOp {
  Handler run = nullptr;  // the instruction itself
  bool copy = false;
  std::vector<std::uint16_t> reads, writes;  // of a wgmma: fragments of A, accumulators
};

struct RegisterWatch {
  std::vector<std::uint32_t> at;  // by place in the code: number of the operation, plus one
  std::vector<WatchedOp> ops;
  std::size_t registers = 0;

  const WatchedOp& op(std::uint32_t pc) const { return ops[at[pc] - 1]; }
};

// Registers of the operations in `products` are watched, and those they are copied from or to: nvcc puts moves around
// inline asm, which ptxas removes.
std::shared_ptr<const RegisterWatch> watch_registers(std::vector<Op>& code, const RegisterUses& uses,
                                                     const std::vector<std::size_t>& products);

// What a warp has in flight. Products belong to groups, numbered from 1; group 0 is none.
struct WarpgroupState {
  explicit WarpgroupState(const RegisterWatch& watch) : registers(watch.registers) {}

  // A wgmma of this warp, which is at its operation, with accumulators of a shape.
  void begin(Warp& warp, std::uint32_t shape);
  void fence() { ++fences; }
  void commit() { ++group; }
  void wait(Warp& warp, std::uint32_t groups_left);

  struct Touch {
    std::uint32_t fences = 0;  // executed before it, plus one; 0: never
    std::uint32_t place = 0;
  };
  struct Register {
    std::uint32_t group = 0, product = 0;              // that accumulates here, and its place in the code
    std::uint32_t input_group = 0, input_product = 0;  // that reads it as a fragment of A
    bool moved = false;                                // the accumulator lives on in a copy
    Touch read, written;                               // by ordinary instructions
    Touch accumulated;                                 // by wgmma of this
    std::uint32_t shape = 0;
  };
  struct Operands {
    std::uint32_t group;
    int read;  // the shadow's number
  };

  std::vector<Register> registers;
  std::vector<Operands> operands;  // in shared memory, of products in flight
  std::uint32_t group = 1;         // being filled
  std::uint32_t fences = 0;
};

}  // namespace gpusim
