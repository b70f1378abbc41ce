// mov, packing and unpacking of vectors, conversions of addresses, and the registers that change while running.
#include "block.h"
#include "handlers.h"

namespace gpusim {

namespace {

template <class T>
void copy(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](T a) { return a; }, w.reg<T>(op.d), w.reg<T>(op.a));
}

void copy_predicate(Warp& w, const Op& op, Mask m) {
  Mask& d = w.pred(op.d);
  d = (d & ~m) | (w.pred(op.a) & m);
}

struct Wide128 {
  std::uint64_t low, high;
};

void copy_128(Warp& w, const Op& op, Mask m) {
  for_each_lane(m, [&](int l) { w.reg<Wide128>(op.d)[l] = w.reg<Wide128>(op.a)[l]; });
}

// d = {e0, e1, ...}, the first element in the low bits. op.count elements of op.size bytes into op.imm bytes.
void pack(Warp& w, const Op& op, Mask m) {
  std::byte result[kLanes * 16];
  const auto bytes = static_cast<std::size_t>(op.imm);
  for (int e = 0; e < op.count; ++e) {
    const std::byte* source = w.regs + op.list[e];
    for (int l = 0; l < kLanes; ++l) std::memcpy(result + l * bytes + e * op.size, source + l * op.size, op.size);
  }
  for_each_lane(m, [&](int l) { std::memcpy(w.regs + op.d + l * bytes, result + l * bytes, bytes); });
}

void unpack(Warp& w, const Op& op, Mask m) {
  std::byte source[kLanes * 16];
  const auto bytes = static_cast<std::size_t>(op.imm);
  std::memcpy(source, w.regs + op.a, kLanes * bytes);
  for (int e = 0; e < op.count; ++e) {
    std::byte* d = w.regs + op.list[e];
    for_each_lane(m, [&](int l) { std::memcpy(d + l * op.size, source + l * bytes + e * op.size, op.size); });
  }
}

void pack_halves(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m, [](std::uint16_t low, std::uint16_t high) { return static_cast<std::uint32_t>(high) << 16 | low; },
      w.reg<std::uint32_t>(op.d), w.reg<std::uint16_t>(op.list[0]), w.reg<std::uint16_t>(op.list[1]));
}

void unpack_halves(Warp& w, const Op& op, Mask m) {
  std::uint32_t a[kLanes];
  std::memcpy(a, w.reg<std::uint32_t>(op.a), sizeof a);
  map_lanes(m, [](std::uint32_t x) { return static_cast<std::uint16_t>(x); }, w.reg<std::uint16_t>(op.list[0]), a);
  map_lanes(
      m, [](std::uint32_t x) { return static_cast<std::uint16_t>(x >> 16); }, w.reg<std::uint16_t>(op.list[1]), a);
}

void pack_words(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m, [](std::uint32_t low, std::uint32_t high) { return std::uint64_t{high} << 32 | low; },
      w.reg<std::uint64_t>(op.d), w.reg<std::uint32_t>(op.list[0]), w.reg<std::uint32_t>(op.list[1]));
}

void unpack_words(Warp& w, const Op& op, Mask m) {
  const auto* a = w.reg<std::uint64_t>(op.a);  // a register of another width: none of the destinations
  map_lanes(m, [](std::uint64_t x) { return static_cast<std::uint32_t>(x); }, w.reg<std::uint32_t>(op.list[0]), a);
  map_lanes(
      m, [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }, w.reg<std::uint32_t>(op.list[1]), a);
}

// A clock that counts the operations of the block.
template <class T>
void read_clock(Warp& w, const Op& op, Mask m) {
  const auto now = static_cast<T>(w.block->steps + w.executed[w.pc - 1]);
  for_each_lane(m, [&](int l) { w.reg<T>(op.d)[l] = now; });
}

void select_mov(Decoder& d) {
  const Type type = d.take_type();
  const int width = width_of(type);
  using Kind = ptx::Operand::Kind;
  if (type == Type::pred) {
    d.op.d = d.predicate(d.operand(0).name);
    d.op.a = d.source(1, 1);
    d.op.run = copy_predicate;
    return;
  }
  const auto vector = [&](std::size_t i) {
    std::vector<Slot> slots;
    const auto parts = d.elements(i);
    d.op.count = static_cast<std::uint8_t>(parts.size());
    d.op.size = static_cast<std::uint8_t>(width / parts.size());
    d.op.imm = width;
    for (const ptx::Operand* part : parts) {
      slots.push_back(i == 0 ? d.dest(part->name, d.op.size) : d.source(*part, d.op.size));
    }
    d.op.list = d.list(slots);
    return d.op.count == 2 ? d.op.size : 0;
  };
  if (d.operand(1).kind == Kind::list) {
    d.op.d = d.dest(0, width);
    const int size = vector(1);
    d.op.run = size == 2 ? pack_halves : size == 4 ? pack_words : pack;
    return;
  }
  if (d.operand(0).kind == Kind::list) {
    d.op.a = d.source(1, width);
    const int size = vector(0);
    d.op.run = size == 2 ? unpack_halves : size == 4 ? unpack_words : unpack;
    return;
  }
  d.op.d = d.dest(0, width);
  const std::string& name = d.operand(1).name;
  if (name == "%clock" || name == "%clock_hi" || name == "%globaltimer_lo" || name == "%globaltimer_hi") {
    d.op.run = read_clock<std::uint32_t>;
    return;
  }
  if (name == "%clock64" || name == "%globaltimer") {
    d.op.run = read_clock<std::uint64_t>;
    return;
  }
  d.op.a = d.source(1, width);
  d.op.run = width == 16 ? copy_128 : for_width(width, []<class T>() -> Handler { return copy<T>; });
}

template <class T, std::uint64_t Window, bool ToGeneric>
void convert_address(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](T a) { return static_cast<T>(ToGeneric ? a + Window : a - Window); }, w.reg<T>(op.d), w.reg<T>(op.a));
}

// cvta: only the windows of shared and local memory move; global, const and param addresses are generic addresses.
void select_cvta(Decoder& d) {
  const bool to_space = d.take("to");
  const std::string_view space =
      d.take_any({"global", "shared::cta", "shared::cluster", "shared", "local", "const", "param", "param::entry"});
  const Type type = d.take_type();
  d.kind = Class::integer;
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  if (width_of(type) == 4) {
    d.op.run = copy<std::uint32_t>;
  } else if (space.substr(0, 6) == "shared") {
    d.op.run = to_space ? convert_address<std::uint64_t, kSharedWindow, false>
                        : convert_address<std::uint64_t, kSharedWindow, true>;
  } else if (space == "local") {
    d.op.run = to_space ? convert_address<std::uint64_t, kLocalWindow, false>
                        : convert_address<std::uint64_t, kLocalWindow, true>;
  } else {
    d.op.run = copy<std::uint64_t>;
  }
}

// isspacep p, a
template <int Which>
void is_space(Warp& w, const Op& op, Mask m) {
  const Mask holds = lanes_where(
      [](std::uint64_t a) {
        const std::uint64_t window = a >> 32 << 32;
        if (Which == 0) return window == kSharedWindow;
        if (Which == 1) return window == kLocalWindow;
        return window != kSharedWindow && window != kLocalWindow;
      },
      w.reg<std::uint64_t>(op.a));
  Mask& d = w.pred(op.d);
  d = (d & ~m) | (holds & m);
}

void select_isspacep(Decoder& d) {
  const std::string_view space =
      d.take_any({"global", "shared::cta", "shared::cluster", "shared", "local", "const", "param"});
  d.op.d = d.predicate(d.operand(0).name);
  d.op.a = d.source(1, 8);
  d.op.run = space.substr(0, 6) == "shared" ? is_space<0> : space == "local" ? is_space<1> : is_space<2>;
}

// mapa d, address, rank: a cluster has one block, so every address is its own.
void select_mapa(Decoder& d) {
  d.ignore({"shared::cluster"});
  const Type type = d.take_type();
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.run = width_of(type) == 8 ? copy<std::uint64_t> : copy<std::uint32_t>;
}

// createpolicy policy, ...: there are no caches, so a policy says nothing.
void select_createpolicy(Decoder& d) {
  if (!d.take("fractional") && !d.take("cvt")) d.fail("createpolicy.range is not known to the simulator");
  d.take_cache_hints();
  d.ignore({"L2", "b64"});
  d.op.d = d.dest(0, 8);
  d.op.a = d.constant(0, 8);
  d.op.run = copy<std::uint64_t>;
}

}  // namespace

void add_move(InstructionTable& t) {
  t["mov"] = select_mov;
  t["cvta"] = select_cvta;
  t["isspacep"] = select_isspacep;
  t["mapa"] = select_mapa;
  t["createpolicy"] = select_createpolicy;
}

}  // namespace gpusim
