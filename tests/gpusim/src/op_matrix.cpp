// Tensor cores of one warp: ldmatrix, stmatrix and mma.sync, from the layouts of their fragments.
#include <bit>

#include "access.h"
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

// ldmatrix: lane l gives the address of row l % 8 of matrix l / 8; lane l receives elements (l / 4, 2 (l % 4) + {0,
// 1}).
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
    std::uint16_t tile[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(tile[r], p[8 * j + r], 16);
    auto* d = w.reg<std::uint32_t>(op.list[j]);
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4, col = 2 * (l % 4);
      const std::uint32_t low = Transposed ? tile[col][row] : tile[row][col];
      const std::uint32_t high = Transposed ? tile[col + 1][row] : tile[row][col + 1];
      d[l] = low | high << 16;
    }
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
    std::uint16_t tile[8][8];
    const auto* s = w.reg<std::uint32_t>(op.list[j]);
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4, col = 2 * (l % 4);
      (Transposed ? tile[col][row] : tile[row][col]) = static_cast<std::uint16_t>(s[l]);
      (Transposed ? tile[col + 1][row] : tile[row][col + 1]) = static_cast<std::uint16_t>(s[l] >> 16);
    }
    for (int r = 0; r < 8; ++r) {
      const int giver = 8 * j + r;
      // another thread wrote here at the same time: fine if it was the same
      if ((contested >> giver & 1) && std::memcmp(p[giver], tile[r], 16) != 0)
        w.block->shadow->refuse_write(w, giver, static_cast<std::uint32_t>(p[giver] - w.block->shared));
      std::memcpy(p[giver], tile[r], 16);
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
using Row = float __attribute__((vector_size(32)));
using HalfRow = float __attribute__((vector_size(16)));

struct Tile {
  Row row[8];
};

template <class H>
Row halves_to_row(const std::uint16_t* from) {
  if constexpr (std::is_same_v<H, BFloat>) {
    std::uint32_t bits[8];
    for (int i = 0; i < 8; ++i) bits[i] = static_cast<std::uint32_t>(from[i]) << 16;
    return std::bit_cast<Row>(bits);
  }
#if defined(__F16C__)
  return std::bit_cast<Row>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  float values[8];
  for (int i = 0; i < 8; ++i) values[i] = to_float(H{from[i]});
  return std::bit_cast<Row>(values);
#endif
}

template <class H>
Tile read_tile(Warp& w, Slot slot) {
  const auto* halves = w.reg<std::uint16_t>(slot);
  Tile t;
  for (int r = 0; r < 8; ++r) t.row[r] = halves_to_row<H>(halves + 8 * r);
  return t;
}

Tile transpose(const Tile& t) {
  Row a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shufflevector(t.row[2 * i], t.row[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[2 * i + 1] = __builtin_shufflevector(t.row[2 * i], t.row[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + j + 2] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  Tile out;
  for (int i = 0; i < 4; ++i) {
    out.row[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    out.row[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  return out;
}

// Even and odd columns of a tile of 32-bit elements
Tile join_columns(const float* even, const float* odd) {
  Tile t;
  for (int g = 0; g < 8; ++g) {
    HalfRow e, o;
    std::memcpy(&e, even + 4 * g, sizeof e);
    std::memcpy(&o, odd + 4 * g, sizeof o);
    t.row[g] = __builtin_shufflevector(e, o, 0, 4, 1, 5, 2, 6, 3, 7);
  }
  return t;
}

void split_columns(const Tile& t, float* even, float* odd) {
  for (int g = 0; g < 8; ++g) {
    const HalfRow e = __builtin_shufflevector(t.row[g], t.row[g], 0, 2, 4, 6),
                  o = __builtin_shufflevector(t.row[g], t.row[g], 1, 3, 5, 7);
    std::memcpy(even + 4 * g, &e, sizeof e);
    std::memcpy(odd + 4 * g, &o, sizeof o);
  }
}

// c += a b, in the order of k. Products of two numbers of at most 11 bits are exact in fp32, so that a product and a
// sum are one rounding.
[[gnu::always_inline]] inline void multiply_tile(const Tile& a, const Tile& b, Tile& c, int depth) {
  for (int i = 0; i < 8; i += 4) {
    Row c0 = c.row[i], c1 = c.row[i + 1], c2 = c.row[i + 2], c3 = c.row[i + 3];
    for (int k = 0; k < depth; ++k) {
      c0 += a.row[i][k] * b.row[k];
      c1 += a.row[i + 1][k] * b.row[k];
      c2 += a.row[i + 2][k] * b.row[k];
      c3 += a.row[i + 3][k] * b.row[k];
    }
    c.row[i] = c0, c.row[i + 1] = c1, c.row[i + 2] = c2, c.row[i + 3] = c3;
  }
}

// The accumulator of 16 rows: two tiles. As halves, a register is a tile.
template <bool HalfAccumulator>
void read_c(Warp& w, const Slot* slots, Tile (&c)[2]) {
  for (int i = 0; i < 2; ++i) {
    if constexpr (HalfAccumulator)
      c[i] = read_tile<Half>(w, slots[i]);
    else
      c[i] = join_columns(w.reg<float>(slots[2 * i]), w.reg<float>(slots[2 * i + 1]));
  }
}

template <bool HalfAccumulator>
void write_d(Warp& w, const Slot* slots, const Tile (&d)[2]) {
  for (int i = 0; i < 2; ++i) {
    if constexpr (HalfAccumulator) {
      auto* halves = w.reg<std::uint16_t>(slots[i]);
      for (int h = 0; h < 64; ++h) halves[h] = to_half(d[i].row[h / 8][h % 8]).bits;
    } else {
      split_columns(d[i], w.reg<float>(slots[2 * i]), w.reg<float>(slots[2 * i + 1]));
    }
  }
}

// The tensor core reads the upper 19 bits of an fp32 register as tf32. Lane l: row l / 4, column l % 4.
void read_tf32(Warp& w, Slot slot, Tile& t, int first_column) {
  const auto* r = w.reg<std::uint32_t>(slot);
  for (int l = 0; l < kLanes; ++l) t.row[l / 4][first_column + l % 4] = std::bit_cast<float>(r[l] & 0xffffe000u);
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
  const Slot *a = op.list + c_regs, *b = a + a_regs;
  Tile c[2];
  read_c<HalfAccumulator>(w, b + b_regs, c);
  for (int k = 0; k < b_regs; ++k) {
    const Tile columns = transpose(read_tile<H>(w, b[k]));
    for (int i = 0; i < 2; ++i) multiply_tile(read_tile<H>(w, a[2 * k + i]), columns, c[i], 8);
  }
  write_d<HalfAccumulator>(w, op.list, c);
}

// m16n8k8: a_i (g + 8 (i & 1), t + 4 (i >> 1)), b_i (t + 4 i, g); m16n8k4: the first half of it
template <int K>
void mma_tf32(Warp& w, const Op& op, Mask m) {
  if (!whole_warp(w, m)) return;
  const Slot *a = op.list + 4, *b = a + K / 2;
  Tile c[2], rows[2], columns;
  for (int i = 0; i < K / 4; ++i) {
    read_tf32(w, a[2 * i], rows[0], 4 * i);
    read_tf32(w, a[2 * i + 1], rows[1], 4 * i);
    read_tf32(w, b[i], columns, 4 * i);
  }
  read_c<false>(w, b + K / 4, c);
  columns = transpose(columns);
  for (int i = 0; i < 2; ++i) multiply_tile(rows[i], columns, c[i], K);
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
