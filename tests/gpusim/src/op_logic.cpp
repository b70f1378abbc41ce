// Bitwise logic, shifts, and the byte permutation.
#include "handlers.h"

namespace gpusim {

namespace {

enum class Logic { and_, or_, xor_ };

template <Logic L, class T>
T combine(T a, T b) {
  if constexpr (L == Logic::and_)
    return a & b;
  else if constexpr (L == Logic::or_)
    return a | b;
  else
    return a ^ b;
}

template <Logic L>
void combine_predicates(Warp& w, const Op& op, Mask m) {
  const Mask result = combine<L, Mask>(w.pred(op.a), w.pred(op.b));
  Mask& d = w.pred(op.d);
  d = (d & ~m) | (result & m);
}

void not_predicate(Warp& w, const Op& op, Mask m) {
  Mask& d = w.pred(op.d);
  d = (d & ~m) | (~w.pred(op.a) & m);
}

template <Logic L>
void select_logic(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  if (type == Type::pred) {
    d.op.d = d.predicate(d.operand(0).name);
    d.op.a = d.source(1, 1);
    d.op.b = d.source(2, 1);
    d.op.run = combine_predicates<L>;
    return;
  }
  same_width_operands(d, width_of(type));
  d.op.run = for_width(width_of(type), []<class T>() -> Handler { return binary<T, T, T, combine<L, T>>; });
}

void select_not(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  if (type == Type::pred) {
    d.op.d = d.predicate(d.operand(0).name);
    d.op.a = d.source(1, 1);
    d.op.run = not_predicate;
    return;
  }
  same_width_operands(d, width_of(type));
  d.op.run = for_width(width_of(type),
                       []<class T>() -> Handler { return unary<T, T, [](T a) { return static_cast<T>(~a); }>; });
}

void select_cnot(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, width_of(type));
  d.op.run = for_width(width_of(type),
                       []<class T>() -> Handler { return unary<T, T, [](T a) { return static_cast<T>(a == 0); }>; });
}

// Shifts by more than the width give what shifting bit by bit would give.
template <class T>
T shift_left(T a, std::uint32_t by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by);
}
template <class T>
T shift_right(T a, std::uint32_t by) {
  constexpr std::uint32_t bits = 8 * sizeof(T);
  if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (by >= bits ? bits - 1 : by));
  return by >= bits ? T{0} : static_cast<T>(a >> by);
}

void shift_operands(Decoder& d, Type type) {
  d.kind = Class::integer;
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, 4);
}
void select_shl(Decoder& d) {
  const Type type = d.take_type();
  shift_operands(d, type);
  d.op.run = for_width(width_of(type), []<class T>() -> Handler { return binary<T, T, std::uint32_t, shift_left<T>>; });
}
void select_shr(Decoder& d) {
  const Type type = d.take_type();
  shift_operands(d, type);
  d.op.run = for_integer(type, []<class T>() -> Handler { return binary<T, T, std::uint32_t, shift_right<T>>; });
}

// Funnel shift of the pair (b:a).
template <bool Left, bool Wrap>
std::uint32_t funnel(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const std::uint32_t n = Wrap ? c & 31 : (c > 32 ? 32 : c);
  const std::uint64_t pair = std::uint64_t{b} << 32 | a;
  return static_cast<std::uint32_t>(Left ? (pair << n) >> 32 : pair >> n);
}
void select_shf(Decoder& d) {
  const bool left = d.take_any({"l", "r"}) == "l";
  const bool wrap = d.take_any({"wrap", "clamp"}) == "wrap";
  d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, 4);
  using U = std::uint32_t;
  if (left)
    d.op.run = wrap ? ternary<U, U, U, U, funnel<true, true>> : ternary<U, U, U, U, funnel<true, false>>;
  else
    d.op.run = wrap ? ternary<U, U, U, U, funnel<false, true>> : ternary<U, U, U, U, funnel<false, false>>;
}

// Any function of three bits, given as its truth table: bit 4a + 2b + c of the table.
template <int Table>
std::uint32_t lookup(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r = 0;
  if constexpr (Table & 1) r |= ~a & ~b & ~c;
  if constexpr (Table & 2) r |= ~a & ~b & c;
  if constexpr (Table & 4) r |= ~a & b & ~c;
  if constexpr (Table & 8) r |= ~a & b & c;
  if constexpr (Table & 16) r |= a & ~b & ~c;
  if constexpr (Table & 32) r |= a & ~b & c;
  if constexpr (Table & 64) r |= a & b & ~c;
  if constexpr (Table & 128) r |= a & b & c;
  return r;
}

void lookup_any(Warp& w, const Op& op, Mask m) {
  const auto table = static_cast<std::uint32_t>(op.imm);
  std::uint32_t on[8];
  for (int i = 0; i < 8; ++i) on[i] = table >> i & 1 ? ~0u : 0u;
  map_lanes(
      m,
      [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
        const std::uint32_t low = (~b & ((~c & on[0]) | (c & on[1]))) | (b & ((~c & on[2]) | (c & on[3])));
        const std::uint32_t high = (~b & ((~c & on[4]) | (c & on[5]))) | (b & ((~c & on[6]) | (c & on[7])));
        return (~a & low) | (a & high);
      },
      w.reg<std::uint32_t>(op.d), w.reg<std::uint32_t>(op.a), w.reg<std::uint32_t>(op.b), w.reg<std::uint32_t>(op.c));
}

void select_lop3(Decoder& d) {
  d.take_type();
  d.kind = Class::integer;
  same_width_operands(d, 4);
  d.op.imm = static_cast<std::int64_t>(d.immediate(4));
  using U = std::uint32_t;
  switch (d.op.imm) {
    case 0x80: d.op.run = ternary<U, U, U, U, lookup<0x80>>; break;
    case 0xfe: d.op.run = ternary<U, U, U, U, lookup<0xfe>>; break;
    case 0x96: d.op.run = ternary<U, U, U, U, lookup<0x96>>; break;
    case 0xf8: d.op.run = ternary<U, U, U, U, lookup<0xf8>>; break;
    case 0xea: d.op.run = ternary<U, U, U, U, lookup<0xea>>; break;
    default: d.op.run = lookup_any;
  }
}

std::uint32_t permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t s = selector >> (4 * i);
    auto byte = static_cast<std::uint8_t>(bytes >> (8 * (s & 7)));
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, spread over the byte
    result |= std::uint32_t{byte} << (8 * i);
  }
  return result;
}

template <class F>
void permute_with(Warp& w, const Op& op, Mask m, F selector) {
  map_lanes(
      m, [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) { return permute(a, b, selector(c & 3)); },
      w.reg<std::uint32_t>(op.d), w.reg<std::uint32_t>(op.a), w.reg<std::uint32_t>(op.b), w.reg<std::uint32_t>(op.c));
}
void permute_forward(Warp& w, const Op& op, Mask m) {
  permute_with(w, op, m, [](std::uint32_t n) { return (n | (n + 1) << 4 | (n + 2) << 8 | (n + 3) << 12) & 0x7777; });
}
void permute_backward(Warp& w, const Op& op, Mask m) {
  permute_with(w, op, m,
               [](std::uint32_t n) { return (n | ((n - 1) & 7) << 4 | ((n - 2) & 7) << 8 | ((n - 3) & 7) << 12); });
}
void permute_replicate(Warp& w, const Op& op, Mask m) {
  permute_with(w, op, m, [](std::uint32_t n) { return n * 0x1111; });
}
void permute_16(Warp& w, const Op& op, Mask m) {
  permute_with(w, op, m, [](std::uint32_t n) { return n & 1 ? 0x3232u : 0x1010u; });
}

void permute_left_edge(Warp& w, const Op& op, Mask m) {  // no byte below n
  permute_with(w, op, m, [](std::uint32_t n) {
    return n == 0 ? 0x3210u : n == 1 ? 0x3211u : n == 2 ? 0x3222u : 0x3333u;
  });
}
void permute_right_edge(Warp& w, const Op& op, Mask m) {  // no byte above n
  permute_with(w, op, m, [](std::uint32_t n) { return n == 0 ? 0u : n == 1 ? 0x1110u : n == 2 ? 0x2210u : 0x3210u; });
}

void select_prmt(Decoder& d) {
  d.take_type();
  const std::string_view mode = d.take_any({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
  d.kind = Class::integer;
  same_width_operands(d, 4);
  using U = std::uint32_t;
  if (mode.empty())
    d.op.run = ternary<U, U, U, U, permute>;
  else if (mode == "f4e")
    d.op.run = permute_forward;
  else if (mode == "b4e")
    d.op.run = permute_backward;
  else if (mode == "rc8")
    d.op.run = permute_replicate;
  else if (mode == "ecl")
    d.op.run = permute_left_edge;
  else if (mode == "ecr")
    d.op.run = permute_right_edge;
  else
    d.op.run = permute_16;
}

}  // namespace

void add_logic(InstructionTable& t) {
  t["and"] = select_logic<Logic::and_>;
  t["or"] = select_logic<Logic::or_>;
  t["xor"] = select_logic<Logic::xor_>;
  t["not"] = select_not;
  t["cnot"] = select_cnot;
  t["shl"] = select_shl;
  t["shr"] = select_shr;
  t["shf"] = select_shf;
  t["lop3"] = select_lop3;
  t["prmt"] = select_prmt;
}

}  // namespace gpusim
