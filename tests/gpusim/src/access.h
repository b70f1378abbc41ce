// From the addresses an instruction computes to host pointers, through the checks and counters.
#pragma once

#include <array>
#include <cstddef>

#include "program.h"

namespace gpusim {

struct Block;

enum class AccessKind : std::uint8_t {
  read,
  write,
  atomic,
  async_write,
  bulk_write,
  async_read,
  matrix_read,
  matrix_write
};

using Addresses = std::array<std::uint64_t, kLanes>;
using Pointers = std::array<std::byte*, kLanes>;

// address register + offset of every lane
void compute_addresses(Warp& warp, Slot slot, bool wide, std::int64_t offset, Addresses& out);

// Checks `bytes` at every lane's address in this space and gives the host pointers of the lanes in m. True if that is
// known to be all lanes, side by side.
bool resolve(Warp& warp, Space space, Mask m, const Addresses& addresses, unsigned bytes, AccessKind kind,
             Pointers& out);

// Counts a request whose lanes read different numbers of bytes; the lanes in `counted` have been through resolve().
void count_partial_read(Block& block, Mask m, const Addresses& addresses, const std::uint8_t* bytes, Mask counted);

// Both, for an operation with its address in slot a and offset in imm.
inline bool operand_pointers(Warp& warp, const Op& op, Mask m, unsigned bytes, AccessKind kind, Pointers& out) {
  Addresses addresses;
  compute_addresses(warp, op.a, op.wide_address, op.imm, addresses);
  return resolve(warp, op.space, m, addresses, bytes, kind, out);
}

// Host pointer of `bytes` at one generic or shared address, for instructions executed by one lane.
std::byte* resolve_one(Warp& warp, int lane, Space space, std::uint64_t address, unsigned bytes, AccessKind kind);

}  // namespace gpusim
