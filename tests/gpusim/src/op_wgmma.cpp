// wgmma: a warpgroup (four warps, 128 threads) multiplies 64 x K by K x N into registers; B and maybe A come from
// shared memory through descriptors. The product is computed when it is issued. That it is only there after its wait is
// a matter of checks: of registers (wgmma_registers), and of shared memory, which is being read until then (Shadow).
#include <bit>

#include "async.h"
#include "block.h"
#include "handlers.h"
#include "matrix_rows.h"
#include "tensor_map.h"

namespace gpusim {

namespace {

// op.mode: bits 0 A from registers, 1 transposed A, 2 transposed B, 3 -A, 4 -B, 5 half accumulators; op.size: bytes of
// an input element; op.count: type (0 f16, 1 bf16, 2 tf32); op.imm: N. op.list: D registers, then A registers (4) or
// descriptor, descriptor of B, predicate scale-d
enum Mode : std::uint16_t {
  kRegisterA = 1,
  kTransposeA = 2,
  kTransposeB = 4,
  kNegateA = 8,
  kNegateB = 16,
  kHalfD = 32
};

// A matrix in shared memory as its descriptor says.
struct Descriptor {
  std::uint32_t start, leading, stride;  // bytes
  Swizzle swizzle;

  explicit Descriptor(std::uint64_t bits)
      : start(static_cast<std::uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4) {
    constexpr Swizzle modes[] = {Swizzle::none, Swizzle::bytes_128, Swizzle::bytes_64, Swizzle::bytes_32};
    swizzle = modes[bits >> 62];
  }

  // Address of element (mn, k). An atom is 8 rows of `span` bytes. K-major: rows are mn, atoms follow each other in mn
  // by `stride`; without swizzle the next 16 bytes of k are `leading` away. MN-major: rows are k, atoms follow each
  // other in k by `stride` and in mn by `leading`.
  std::uint32_t address(unsigned mn, unsigned k, unsigned element, bool transposed) const {
    const unsigned span = swizzle == Swizzle::none ? 16 : 16u << static_cast<int>(swizzle);
    std::uint32_t at;
    if (!transposed) {
      const unsigned byte = k * element;
      at = start + mn / 8 * stride + mn % 8 * span;
      at += swizzle == Swizzle::none ? byte / 16 * leading + byte % 16 : byte;
    } else {
      const unsigned byte = mn * element;
      const bool plain = swizzle == Swizzle::none;  // there, leading and stride change places
      at = start + byte / span * (plain ? stride : leading) + k / 8 * (plain ? leading : stride) + k % 8 * span +
           byte % span;
    }
    return swizzled(at, swizzle);
  }
};

// The 8 or 4 elements of 16 bytes, widened.
void widen_chunk(const std::byte* from, int type, float* to) {
  if (type == 2) {
    std::uint32_t bits[4];
    std::memcpy(bits, from, sizeof bits);
    for (int i = 0; i < 4; ++i) to[i] = std::bit_cast<float>(bits[i] & 0xffffe000u);
  } else {
    const auto halves = load_row<Row16>(from);
    store_row(to, type ? widen<BFloat>(halves) : widen<Half>(halves));
  }
}

struct Matrix {
  std::vector<float> values;  // row by row
  unsigned cols;
};

const std::byte* chunk_at(Warp& w, std::uint32_t address, std::vector<Shadow::Bytes>& read) {
  const std::uint32_t offset = address - kSharedBase;
  if (std::uint64_t{offset} + 16 > w.block->shared_bytes) {
    throw Fault{0, text("a matrix of wgmma out of bounds: byte ", static_cast<std::int32_t>(offset), " of ",
                        w.block->shared_bytes)};
  }
  if (!read.empty() && read.back().offset + read.back().bytes == offset)
    read.back().bytes += 16;
  else
    read.push_back({offset, 16});
  return w.block->shared + offset;
}

// Elements mn from `first` to `end` of a matrix of `all` in shared memory: rows of a Matrix, or columns for B. All of
// it is read, says `read`.
Matrix read_shared(Warp& w, const Op& op, std::uint64_t bits, unsigned all, unsigned first, unsigned end, unsigned k,
                   bool transposed, bool is_b, std::vector<Shadow::Bytes>& read) {
  const Descriptor descriptor(bits);
  const unsigned count = end - first;
  Matrix m{std::vector<float>(std::size_t{count} * k), is_b ? count : k};
  const unsigned run = 16 / op.size;  // elements of a 16-byte chunk, along the major dimension
  // steps from one element to the next of a chunk, and to the next chunk's line
  const std::size_t mn_step = is_b ? 1 : k, k_step = is_b ? count : 1;
  const unsigned outer = transposed ? k : all, inner = transposed ? all : k;
  for (unsigned o = 0; o < outer; ++o) {
    for (unsigned i = 0; i < inner; i += run) {
      const unsigned mn = transposed ? i : o, at_k = transposed ? o : i;
      const std::byte* chunk = chunk_at(w, descriptor.address(mn, at_k, op.size, transposed), read);
      if (mn < first || mn >= end) continue;
      float values[8];
      widen_chunk(chunk, op.count, values);
      float* to = m.values.data() + (mn - first) * mn_step + at_k * k_step;
      const std::size_t step = transposed ? mn_step : k_step;
      for (unsigned r = 0; r < run; ++r) to[r * step] = values[r];
    }
  }
  return m;
}

// Each warp holds rows 16 w to 16 w + 15: this computes them, so that the four warps need not meet.
void multiply(Warp& w, const Op& op, Mask m) {
  if (!w.gather(w.live)) return;
  if (m != kAllLanes) throw Fault{__builtin_ctz(~m), "wgmma is executed by a part of a warp"};
  const auto n = static_cast<unsigned>(op.imm);
  const unsigned k = 32 / op.size;
  const unsigned registers = op.mode & kHalfD ? n / 4 : n / 2;
  const Slot* slots = op.list + registers;
  if (w.block->warps.size() < static_cast<std::size_t>(w.index) / 4 * 4 + 4)
    throw Fault{0, "wgmma needs a warpgroup of four warps"};
  WarpgroupState& state = w.block->wgmma[w.index];
  state.begin(w, n << 1 | ((op.mode & kHalfD) != 0));
  std::vector<Shadow::Bytes> read;
  const unsigned first_row = w.index % 4 * 16;
  Matrix a;
  if (op.mode & kRegisterA) {
    a = {std::vector<float>(16 * k), k};
    for (unsigned i = 0; i < 4; ++i) {  // a tile of 8 x 4 words, row by row
      const auto* tile = reinterpret_cast<const std::byte*>(w.reg<std::uint32_t>(slots[i]));
      float* to = a.values.data() + 8 * (i & 1) * k + (i >> 1) * k / 2;
      for (unsigned row = 0; row < 8; ++row) widen_chunk(tile + 16 * row, op.count, to + row * k);
    }
    slots += 4;
  } else {
    a = read_shared(w, op, w.reg<std::uint64_t>(*slots++)[0], 64, first_row, first_row + 16, k, op.mode & kTransposeA,
                    false, read);
  }
  const Matrix b = read_shared(w, op, w.reg<std::uint64_t>(*slots++)[0], n, 0, n, k, op.mode & kTransposeB, true, read);
  if (w.block->shadow)
    state.operands.push_back({state.group, w.block->shadow->begin_read(w, Shadow::kWarp, std::move(read))});
  const bool accumulate = w.pred(*slots) & 1;
  const float sign = ((op.mode & kNegateA) != 0) != ((op.mode & kNegateB) != 0) ? -1.0f : 1.0f;

  std::vector<float> d(std::size_t{16} * n);
  const auto place = [n](unsigned l, unsigned v) {
    return (l / 4 + 8 * (v >> 1 & 1)) * n + 8 * (v >> 2) + 2 * (l % 4) + (v & 1);
  };
  if (accumulate) {
    for (unsigned v = 0; v < n / 2; ++v) {
      for (unsigned l = 0; l < kLanes; ++l) {
        d[place(l, v)] = op.mode & kHalfD ? to_float(Half{w.reg<std::uint16_t>(op.list[v / 2])[2 * l + (v & 1)]})
                                          : w.reg<float>(op.list[v])[l];
      }
    }
  }
  for (unsigned row = 0; row < 16; ++row) {
    float* out = d.data() + std::size_t{row} * n;
    for (unsigned i = 0; i < k; ++i) {
      const float x = a.values[row * k + i] * sign;
      const float* columns = b.values.data() + std::size_t{i} * n;
      for (unsigned j = 0; j < n; ++j) out[j] += x * columns[j];
    }
  }
  for (unsigned v = 0; v < n / 2; ++v) {
    for (unsigned l = 0; l < kLanes; ++l) {
      if (op.mode & kHalfD)
        w.reg<std::uint16_t>(op.list[v / 2])[2 * l + (v & 1)] = to_half(d[place(l, v)]).bits;
      else
        w.reg<float>(op.list[v])[l] = d[place(l, v)];
    }
  }
}

// op.mode: 0 fence, 1 commit_group, 2 wait_group of op.imm. A kernel may have these and no product.
void synchronize(Warp& w, const Op& op, Mask) {
  if (!w.gather(w.live) || w.block->wgmma.empty()) return;
  WarpgroupState& state = w.block->wgmma[w.index];
  if (op.mode == 0) state.fence();
  if (op.mode == 1) state.commit();
  if (op.mode == 2) state.wait(w, static_cast<std::uint32_t>(op.imm));
}

void select_wgmma(Decoder& d) {
  d.ignore({"sync", "aligned"});
  if (const std::string_view what = d.take_any({"fence", "commit_group", "wait_group"}); !what.empty()) {
    d.kind = Class::synchronization;
    d.op.mode = what == "fence" ? 0 : what == "commit_group" ? 1 : 2;
    if (d.op.mode == 2) d.op.imm = static_cast<std::int64_t>(d.immediate(0));
    d.op.run = synchronize;
    return;
  }
  if (!d.take("mma_async")) d.fail("this wgmma is not known to the simulator");
  unsigned n = 0, k = 0;
  for (const std::string_view part : d.modifiers()) {
    if (part.substr(0, 4) != "m64n") continue;
    const std::string shape(part);
    n = static_cast<unsigned>(std::stoul(shape.substr(4)));
    k = static_cast<unsigned>(std::stoul(shape.substr(shape.find('k') + 1)));
    d.take(part);
  }
  const Type dt = d.take_type(), at = d.take_type(), bt = d.take_type();
  if (at != bt || n < 8 || n > 256 || n % 8) d.fail("this wgmma is not known to the simulator");
  if (at != Type::f16 && at != Type::bf16 && at != Type::tf32)
    d.fail("this type of wgmma is not known to the simulator");
  d.kind = Class::tensor_core;
  d.tensor_flops = 2 * 16 * n * k;  // a warp's share
  d.op.imm = n;
  d.op.size = at == Type::tf32 ? 4 : 2;
  d.op.count = at == Type::f16 ? 0 : at == Type::bf16 ? 1 : 2;
  if (k != 32u / d.op.size) d.fail("this shape of wgmma is not known to the simulator");
  if (dt == Type::f16) d.op.mode |= kHalfD;
  std::vector<Slot> slots;
  for (const ptx::Operand* part : d.elements(0)) slots.push_back(d.dest(part->name, 4));
  if (slots.size() != (dt == Type::f16 ? n / 4 : n / 2)) d.fail("the wrong number of accumulators");
  const bool in_registers = d.operand(1).kind == ptx::Operand::Kind::list;
  if (in_registers) {
    d.op.mode |= kRegisterA;
    for (const ptx::Operand* part : d.elements(1)) slots.push_back(d.source(*part, 4));
  } else {
    slots.push_back(d.source(1, 8));
  }
  slots.push_back(d.source(2, 8));
  slots.push_back(d.source(3, 1));
  d.op.list = d.list(slots);
  const auto is = [&](std::size_t i, std::uint64_t value) { return d.operand_count() > i && d.immediate(i) == value; };
  d.op.flags |= kOpAsyncProxy;
  d.watch();
  if (is(4, ~0ull)) d.op.mode |= kNegateA;
  if (is(5, ~0ull)) d.op.mode |= kNegateB;
  if (!in_registers && is(6, 1)) d.op.mode |= kTransposeA;
  if (is(in_registers ? 6 : 7, 1)) d.op.mode |= kTransposeB;
  d.op.run = multiply;
}

}  // namespace

void add_wgmma(InstructionTable& t) {
  t["wgmma"] = select_wgmma;
  t["setmaxnreg"] = select_setmaxnreg;
}

}  // namespace gpusim
