// Which element each lane holds in mma.sync, and which row each lane names to ldmatrix.
//
// A fragment is 16 rows by 32 bytes of k in four registers: the A operand of one m16n8k16 (16-bit elements) or m16n8k8
// (TF32), or the B operands of two neighbours, with n in the place of the rows. Its quarters are 8 rows by 16 bytes
// of k, a register each. A numbers them down the rows first; B along k first, so that each B operand is a register
// pair.
#pragma once

#include "host_device.h"

namespace mha_ext {

constexpr int kFragmentRows = 16;
constexpr int kFragmentBytes = 32;  // along k

enum class Operand { kA, kB };

// Where a register's quarter lies: in the lower rows, in the upper half of k.
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int quarter_row(int reg) {
  return kOperand == Operand::kA ? reg & 1 : reg >> 1;
}
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int quarter_k(int reg) {
  return kOperand == Operand::kA ? reg >> 1 : reg & 1;
}

// The row of a register ...
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int fragment_row(int lane, int reg) {
  return (lane >> 2) + 8 * quarter_row<kOperand>(reg);
}

// ... and its first k: one element of 4 bytes, two neighbours of 2 bytes.
template <Operand kOperand, int kElementBytes>
constexpr MHA_HOST_DEVICE int fragment_k(int lane, int reg) {
  return ((lane & 3) * 4 + quarter_k<kOperand>(reg) * 16) / kElementBytes;
}

// The accumulator is 16 by 8 in four registers.
constexpr MHA_HOST_DEVICE int accumulator_row(int lane, int reg) { return (lane >> 2) + 8 * (reg >> 1); }
constexpr MHA_HOST_DEVICE int accumulator_col(int lane, int reg) { return (lane & 3) * 2 + (reg & 1); }

// ldmatrix.x4 reads quarter lane / 8 from the row that the lane names.
// Where k is contiguous in memory: a fragment row, and a 16-byte half of k.
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int ldmatrix_row(int lane) {
  return (lane & 7) + 8 * quarter_row<kOperand>(lane >> 3);
}
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int ldmatrix_chunk(int lane) {
  return quarter_k<kOperand>(lane >> 3);
}

// Where the rows are contiguous in memory (.trans, 16-bit elements): a k, and 8 of the fragment's rows.
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int ldmatrix_trans_k(int lane) {
  return (lane & 7) + 8 * quarter_k<kOperand>(lane >> 3);
}
template <Operand kOperand>
constexpr MHA_HOST_DEVICE int ldmatrix_trans_chunk(int lane) {
  return quarter_row<kOperand>(lane >> 3);
}

// An accumulator as operand A of a TF32 product: a lane holds columns 2t and 2t + 1 of it, where A wants k = t and t
// + 4. So k = t and t + 4 stand for rows 2t and 2t + 1 of the other matrix, and nothing changes lanes. Of both rows a
// lane reads four neighbours, columns 4g .. 4g + 3 of 32: one for each of four accumulators of 8 columns.
constexpr MHA_HOST_DEVICE int weighted_row(int lane) { return (lane & 3) * 2; }
constexpr MHA_HOST_DEVICE int weighted_col(int lane) { return (lane >> 2) * 4; }

// The register of the accumulator that is operand A's register.
constexpr MHA_HOST_DEVICE int weight_register(int reg) { return reg == 1 || reg == 2 ? 3 - reg : reg; }

// The column that column `col` of accumulator `tile` of the four holds.
constexpr MHA_HOST_DEVICE int weighted_out_col(int tile, int col) { return tile + col * 4; }

}  // namespace mha_ext
