// Tensor cores of one warp: ldmatrix, stmatrix and mma.sync, from the layouts of their fragments.
#include <bit>

#include "access.h"
#include "block.h"
#include "handlers.h"
#include "matrix_rows.h"

namespace gpusim {

namespace {

// ldmatrix: lane l gives the address of row l % 8 of matrix l / 8; lane l receives elements (l / 4, 2 (l % 4) + {0,
// 1}): a register, lane by lane, is the matrix row by row.
template <bool Transposed>
void load_matrix(Warp& w, const Op& op, Mask m) {
  if (!w.gather(w.live)) return;
  if (m != kAllLanes) throw Fault{__builtin_ctz(~m), "ldmatrix is executed by a part of a warp"};
  Addresses addresses;
  compute_addresses(w, op.a, op.wide_address, op.imm, addresses);
  const int rows = 8 * op.count;
  const Mask givers = rows == 32 ? kAllLanes : (1u << rows) - 1;
  Pointers p;
  resolve(w, op.space, givers, addresses, 16, AccessKind::matrix_read, p);
  for (int j = 0; j < op.count; ++j) {
    Row16 tile[8];
    for (int r = 0; r < 8; ++r) tile[r] = load_row<Row16>(p[8 * j + r]);
    if constexpr (Transposed) transpose(tile);
    auto* d = w.reg<std::uint16_t>(op.list[j]);
    for (int r = 0; r < 8; ++r) store_row(d + 8 * r, tile[r]);
  }
}

template <bool Transposed>
void store_matrix(Warp& w, const Op& op, Mask m) {
  if (!w.gather(w.live)) return;
  if (m != kAllLanes) throw Fault{__builtin_ctz(~m), "stmatrix is executed by a part of a warp"};
  Addresses addresses;
  compute_addresses(w, op.a, op.wide_address, op.imm, addresses);
  const int rows = 8 * op.count;
  const Mask givers = rows == 32 ? kAllLanes : (1u << rows) - 1;
  Pointers p;
  resolve(w, op.space, givers, addresses, 16, AccessKind::matrix_write, p);
  const Mask contested = w.contested;
  for (int j = 0; j < op.count; ++j) {
    Row16 tile[8];
    const auto* s = w.reg<std::uint16_t>(op.list[j]);
    for (int r = 0; r < 8; ++r) tile[r] = load_row<Row16>(s + 8 * r);
    if constexpr (Transposed) transpose(tile);
    for (int r = 0; r < 8; ++r) {
      const int giver = 8 * j + r;
      // another thread wrote here at the same time: fine if it was the same
      if ((contested >> giver & 1) && std::memcmp(p[giver], &tile[r], 16) != 0)
        w.block->shadow->refuse_write(w, giver, static_cast<std::uint32_t>(p[giver] - w.block->shared));
      store_row(p[giver], tile[r]);
    }
  }
}

template <bool Store>
void select_matrix(Decoder& d) {
  d.ignore({"sync", "aligned"});
  if (!d.take("m8n8")) d.fail("this shape is not known to the simulator");
  const std::string_view number = d.take_any({"x1", "x2", "x4"});
  const bool transposed = d.take("trans");
  d.op.space = take_space(d);
  d.take_type();
  d.kind = Class::matrix_load;
  d.op.count = static_cast<std::uint8_t>(number[1] - '0');
  d.address(Store ? 0 : 1);
  std::vector<Slot> slots;
  for (const ptx::Operand* part : d.elements(Store ? 1 : 0))
    slots.push_back(Store ? d.source(*part, 4) : d.dest(part->name, 4));
  if (slots.size() != d.op.count) d.fail("the wrong number of registers");
  d.op.list = d.list(slots);
  if (Store)
    d.op.run = transposed ? store_matrix<true> : store_matrix<false>;
  else
    d.op.run = transposed ? load_matrix<true> : load_matrix<false>;
}

// The fragments of mma.sync are made of 8 x 8 tiles, one register each. In a tile of 16-bit elements lane l holds row
// l / 4, columns 2 (l % 4) and the next: the 64 halves of the register, lane by lane, are the tile row by row.
//   A (16 x 16): registers 0 to 3 are the tiles at (0, 0), (8, 0), (0, 8), (8, 8).
//   B (16 x 8): registers 0 and 1 are the tiles at k = 0 and k = 8, their rows being the columns of B.
//   C (16 x 8): registers 2 i and 2 i + 1 hold the even and the odd columns of the tile at row 8 i.
// Inside, the columns of B and C stand in the order of the registers of C: first the even ones.
constexpr int kColumns[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// c += a b for 16 rows, in the order of k. Products of two numbers of at most 11 bits are exact in fp32.
template <int K>
[[gnu::always_inline]] inline void multiply(const float (&a)[16][K], const Row (&b)[K], Row (&c)[16]) {
  for (int i = 0; i < 16; i += 8) {
    Row c0 = c[i], c1 = c[i + 1], c2 = c[i + 2], c3 = c[i + 3];
    Row c4 = c[i + 4], c5 = c[i + 5], c6 = c[i + 6], c7 = c[i + 7];
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      c0 = fused(a[i][k], b[k], c0);
      c1 = fused(a[i + 1][k], b[k], c1);
      c2 = fused(a[i + 2][k], b[k], c2);
      c3 = fused(a[i + 3][k], b[k], c3);
      c4 = fused(a[i + 4][k], b[k], c4);
      c5 = fused(a[i + 5][k], b[k], c5);
      c6 = fused(a[i + 6][k], b[k], c6);
      c7 = fused(a[i + 7][k], b[k], c7);
    }
    c[i] = c0, c[i + 1] = c1, c[i + 2] = c2, c[i + 3] = c3;
    c[i + 4] = c4, c[i + 5] = c5, c[i + 6] = c6, c[i + 7] = c7;
  }
}

// The accumulator of 16 rows. As halves, a register is a tile.
template <bool HalfAccumulator>
[[gnu::always_inline]] inline void read_c(Warp& w, const Slot* slots, Row (&c)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if constexpr (HalfAccumulator) {
      const Row row = widen<Half>(load_row<Row16>(w.reg<std::uint16_t>(slots[i / 8]) + i % 8 * 8));
      c[i] = __builtin_shufflevector(row, row, 0, 2, 4, 6, 1, 3, 5, 7);
    } else {
      const auto even = load_row<HalfRow>(w.reg<float>(slots[i / 8 * 2]) + i % 8 * 4),
                 odd = load_row<HalfRow>(w.reg<float>(slots[i / 8 * 2 + 1]) + i % 8 * 4);
      c[i] = __builtin_shufflevector(even, odd, 0, 1, 2, 3, 4, 5, 6, 7);
    }
  }
}

template <bool HalfAccumulator>
[[gnu::always_inline]] inline void write_d(Warp& w, const Slot* slots, const Row (&d)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if constexpr (HalfAccumulator) {
      const Row row = __builtin_shufflevector(d[i], d[i], 0, 4, 1, 5, 2, 6, 3, 7);
      store_row(w.reg<std::uint16_t>(slots[i / 8]) + i % 8 * 8, narrow_to_half(row));
    } else {
      store_row(w.reg<float>(slots[i / 8 * 2]) + i % 8 * 4, __builtin_shufflevector(d[i], d[i], 0, 1, 2, 3));
      store_row(w.reg<float>(slots[i / 8 * 2 + 1]) + i % 8 * 4, __builtin_shufflevector(d[i], d[i], 4, 5, 6, 7));
    }
  }
}

struct Place {
  int row, col;
};
constexpr Place c_place(int l, int i) { return {l / 4 + 8 * (i >> 1), 2 * (l % 4) + (i & 1)}; }

bool whole_warp(Warp& w, Mask m) {
  if (!w.gather(w.live)) return false;
  if (m != kAllLanes) throw Fault{__builtin_ctz(~m), "mma is executed by a part of a warp"};
  return true;
}

template <class H, int K, bool HalfAccumulator>
void mma_half(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  constexpr int a_regs = K / 4, b_regs = K / 8, c_regs = HalfAccumulator ? 2 : 4;
  const Slot *a_slots = op.list + c_regs, *b_slots = a_slots + a_regs;
  alignas(32) float a[16][K];
  for (int i = 0; i < a_regs; ++i) {
    const auto* halves = w.reg<std::uint16_t>(a_slots[i]);
    for (int r = 0; r < 8; ++r) store_row(a[8 * (i & 1) + r] + 8 * (i >> 1), widen<H>(load_row<Row16>(halves + 8 * r)));
  }
  Row b[K], c[16];
  for (int i = 0; i < b_regs; ++i) {
    Row16 tile[8];
    for (int j = 0; j < 8; ++j) tile[j] = load_row<Row16>(w.reg<std::uint16_t>(b_slots[i]) + 8 * kColumns[j]);
    transpose(tile);
    for (int k = 0; k < 8; ++k) b[8 * i + k] = widen<H>(tile[k]);
  }
  read_c<HalfAccumulator>(w, b_slots + b_regs, c);
  multiply<K>(a, b, c);
  write_d<HalfAccumulator>(w, op.list, c);
}

// The tensor core reads the upper 19 bits of an fp32 register as tf32. Row r of a register: four columns.
[[gnu::always_inline]] inline HalfRow read_tf32(Warp& w, Slot slot, int r) {
  using Bits = std::uint32_t __attribute__((vector_size(16)));
  return std::bit_cast<HalfRow>(load_row<Bits>(w.reg<std::uint32_t>(slot) + 4 * r) & 0xffffe000u);
}

// m16n8k8: a_i (g + 8 (i & 1), t + 4 (i >> 1)), b_i (t + 4 i, g); m16n8k4: the first half of it
template <int K>
void mma_tf32(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  const Slot *a_slots = op.list + 4, *b_slots = a_slots + K / 2;
  alignas(32) float a[16][K];
  for (int i = 0; i < K / 2; ++i) {
    for (int r = 0; r < 8; ++r) store_row(a[8 * (i & 1) + r] + 4 * (i >> 1), read_tf32(w, a_slots[i], r));
  }
  Row columns[8], b[K], c[16];
  for (int j = 0; j < 8; ++j) {
    const HalfRow low = read_tf32(w, b_slots[0], kColumns[j]),
                  high = K == 8 ? read_tf32(w, b_slots[1], kColumns[j]) : low;
    columns[j] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  transpose(columns);
  for (int k = 0; k < K; ++k) b[k] = columns[k];
  read_c<false>(w, b_slots + K / 4, c);
  multiply<K>(a, b, c);
  write_d<false>(w, op.list, c);
}

// m8n8k4 f64: a (g, t), b (t, g), c (g, 2t + i)
void mma_f64_884(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  double a[8][4], b[4][8], c[8][8];
  for (int l = 0; l < kLanes; ++l) {
    a[l / 4][l % 4] = w.reg<double>(op.list[2])[l];
    b[l % 4][l / 4] = w.reg<double>(op.list[3])[l];
    for (int i = 0; i < 2; ++i) c[l / 4][2 * (l % 4) + i] = w.reg<double>(op.list[4 + i])[l];
  }
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 4; ++k) {
      for (int j = 0; j < 8; ++j) c[i][j] = std::fma(a[i][k], b[k][j], c[i][j]);
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    for (int i = 0; i < 2; ++i) w.reg<double>(op.list[i])[l] = c[l / 4][2 * (l % 4) + i];
  }
}

// m16n8k{4, 8, 16} f64: a_i (g + 8 (i & 1), t + 4 (i >> 1)), b_i (t + 4 i, g), c_i as for fp32
template <int K>
void mma_f64_16(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  constexpr int a_regs = K / 2, b_regs = K / 4;
  double a[16][K], b[K][8], c[16][8];
  for (int l = 0; l < kLanes; ++l) {
    for (int i = 0; i < a_regs; ++i) a[l / 4 + 8 * (i & 1)][l % 4 + 4 * (i >> 1)] = w.reg<double>(op.list[4 + i])[l];
    for (int i = 0; i < b_regs; ++i) b[l % 4 + 4 * i][l / 4] = w.reg<double>(op.list[4 + a_regs + i])[l];
    for (int i = 0; i < 4; ++i)
      c[c_place(l, i).row][c_place(l, i).col] = w.reg<double>(op.list[4 + a_regs + b_regs + i])[l];
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < K; ++k) {
      for (int j = 0; j < 8; ++j) c[i][j] = std::fma(a[i][k], b[k][j], c[i][j]);
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    for (int i = 0; i < 4; ++i) w.reg<double>(op.list[i])[l] = c[c_place(l, i).row][c_place(l, i).col];
  }
}

void select_mma(Decoder& d) {
  d.ignore({"sync", "aligned", "row", "col"});
  const std::string_view shape = d.take_any({"m16n8k16", "m16n8k8", "m16n8k4", "m8n8k4"});
  const Type dt = d.take_type(), at = d.take_type(), bt = d.take_type(), ct = d.take_type();
  d.kind = Class::tensor_core;
  const int width = dt == Type::f64 ? 8 : 4;
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < 4; ++i) {
    for (const ptx::Operand* part : d.elements(i))
      slots.push_back(i == 0 ? d.dest(part->name, width) : d.source(*part, width));
  }
  d.op.list = d.list(slots);
  const int k = shape == "m16n8k16" ? 16 : shape == "m16n8k8" ? 8 : 4;
  d.tensor_flops = 2 * (shape == "m8n8k4" ? 8 : 16) * 8 * k;
  if (at != bt || dt != ct) d.fail("this mixture of types is not known to the simulator");
  const bool half = dt == Type::f16;
  Handler h = nullptr;
  if (at == Type::f16 && k == 16) h = half ? mma_half<Half, 16, true> : mma_half<Half, 16, false>;
  if (at == Type::f16 && k == 8) h = half ? mma_half<Half, 8, true> : mma_half<Half, 8, false>;
  if (at == Type::bf16 && k == 16 && !half) h = mma_half<BFloat, 16, false>;
  if (at == Type::bf16 && k == 8 && !half) h = mma_half<BFloat, 8, false>;
  if (at == Type::tf32 && k == 8) h = mma_tf32<8>;
  if (at == Type::tf32 && k == 4) h = mma_tf32<4>;
  if (at == Type::f64)
    h = shape == "m8n8k4" ? mma_f64_884 : k == 4 ? mma_f64_16<4> : k == 8 ? mma_f64_16<8> : mma_f64_16<16>;
  if (!h || (shape == "m8n8k4" && at != Type::f64)) d.fail("this mma is not known to the simulator");
  d.op.run = h;
}

// movmatrix.sync.aligned.m8n8.trans.b16 d, a
void move_matrix(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  std::uint16_t tile[8][8];
  const auto* a = w.reg<std::uint32_t>(op.a);
  for (int l = 0; l < kLanes; ++l) {
    tile[l / 4][2 * (l % 4)] = static_cast<std::uint16_t>(a[l]);
    tile[l / 4][2 * (l % 4) + 1] = static_cast<std::uint16_t>(a[l] >> 16);
  }
  auto* d = w.reg<std::uint32_t>(op.d);
  for (int l = 0; l < kLanes; ++l)
    d[l] = tile[2 * (l % 4)][l / 4] | static_cast<std::uint32_t>(tile[2 * (l % 4) + 1][l / 4]) << 16;
}

void select_movmatrix(Decoder& d) {
  d.ignore({"sync", "aligned", "m8n8", "trans"});
  d.take_type();
  d.kind = Class::exchange;
  same_width_operands(d, 4);
  d.op.run = move_matrix;
}

}  // namespace

void add_matrix(InstructionTable& t) {
  t["ldmatrix"] = select_matrix<false>;
  t["stmatrix"] = select_matrix<true>;
  t["mma"] = select_mma;
  t["movmatrix"] = select_movmatrix;
}

}  // namespace gpusim
