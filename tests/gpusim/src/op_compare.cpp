// Comparisons and selections: setp, set, selp, slct.
#include <cmath>

#include "float_math.h"
#include "handlers.h"

namespace gpusim {

namespace {

enum class Cmp { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template <Cmp C, class T>
[[gnu::always_inline]] inline bool compare(T a, T b) {
  if constexpr (C == Cmp::eq) return a == b;
  if constexpr (C == Cmp::ne) return (a < b) || (a > b);  // ordered: false for NaN
  if constexpr (C == Cmp::lt) return a < b;
  if constexpr (C == Cmp::le) return a <= b;
  if constexpr (C == Cmp::gt) return a > b;
  if constexpr (C == Cmp::ge) return a >= b;
  if constexpr (C == Cmp::equ) return !((a < b) || (a > b));
  if constexpr (C == Cmp::neu) return !(a == b);
  if constexpr (C == Cmp::ltu) return !(a >= b);
  if constexpr (C == Cmp::leu) return !(a > b);
  if constexpr (C == Cmp::gtu) return !(a <= b);
  if constexpr (C == Cmp::geu) return !(a < b);
  if constexpr (C == Cmp::num) return a == a && b == b;
  if constexpr (C == Cmp::nan) return a != a || b != b;
}

// Where the comparison holds, for each type of operand. Halves are compared as fp32.
template <Cmp C, class T>
Mask compare_lanes(Warp& w, const Op& op) {
  return lanes_where([](T a, T b) { return compare<C, T>(a, b); }, w.reg<T>(op.a), w.reg<T>(op.b));
}
template <Cmp C>
Mask compare_flushed(Warp& w, const Op& op) {
  return lanes_where([](float a, float b) { return compare<C, float>(flush(a), flush(b)); }, w.reg<float>(op.a),
                     w.reg<float>(op.b));
}
template <Cmp C, class H, int Shift>
Mask compare_halves(Warp& w, const Op& op) {
  using Lane = std::conditional_t < Shift<0, std::uint16_t, std::uint32_t>;
  return lanes_where(
      [](Lane a, Lane b) {
        constexpr int shift = Shift < 0 ? 0 : Shift;
        const H x{static_cast<std::uint16_t>(a >> shift)}, y{static_cast<std::uint16_t>(b >> shift)};
        return compare<C, float>(to_float(x), to_float(y));
      },
      w.reg<Lane>(op.a), w.reg<Lane>(op.b));
}

enum class Combine : std::uint16_t { none, and_, or_, xor_ };

Mask combined(Warp& w, const Op& op, Mask result) {
  const Mask c = w.pred(op.c) ^ static_cast<Mask>(op.imm);
  switch (static_cast<Combine>(op.mode)) {
    case Combine::none: return result;
    case Combine::and_: return result & c;
    case Combine::or_: return result | c;
    case Combine::xor_: return result ^ c;
  }
  return result;
}

void write(Warp& w, Slot slot, Mask m, Mask value) {
  Mask& d = w.pred(slot);
  d = (d & ~m) | (value & m);
}

// p|q = compare(a, b) combined with c; q takes the complement of the comparison. op.list[0] is q, or 0.
template <auto Where>
void set_predicates(Warp& w, const Op& op, Mask m) {
  const Mask result = Where(w, op);
  const Mask p = combined(w, op, result);
  if (op.list) write(w, op.list[0], m, combined(w, op, ~result));
  write(w, op.d, m, p);
}

// Packed halves: p for the low halves, q for the high ones.
template <auto Low, auto High>
void set_packed_predicates(Warp& w, const Op& op, Mask m) {
  const Mask low = combined(w, op, Low(w, op)), high = combined(w, op, High(w, op));
  write(w, op.d, m, low);
  if (op.list) write(w, op.list[0], m, high);
}

// set: a value instead of a predicate. op.size: 1 = all ones, 2 = 1.0 as fp32
template <auto Where>
void set_value(Warp& w, const Op& op, Mask m) {
  const Mask result = combined(w, op, Where(w, op));
  const std::uint32_t on = op.size == 2 ? 0x3f800000u : 0xffffffffu;
  auto* d = w.reg<std::uint32_t>(op.d);
  for_each_lane(m, [&](int l) { d[l] = result >> l & 1 ? on : 0; });
}
// op.size: 1 = all ones, 2 = the bits in op.count (1.0 in the format)
template <auto Low, auto High>
void set_packed_value(Warp& w, const Op& op, Mask m) {
  const Mask low = Low(w, op), high = High(w, op);
  const std::uint32_t on = op.size == 2 ? (op.count ? 0x3f80u : 0x3c00u) : 0xffffu;
  auto* d = w.reg<std::uint32_t>(op.d);
  for_each_lane(m, [&](int l) { d[l] = (low >> l & 1 ? on : 0) | (high >> l & 1 ? on << 16 : 0); });
}

struct Choice {
  Handler predicate, value;
};

template <auto Where>
Choice plain() {
  return {set_predicates<Where>, set_value<Where>};
}
template <auto Low, auto High>
Choice packed() {
  return {set_packed_predicates<Low, High>, set_packed_value<Low, High>};
}

template <Cmp C>
Choice for_type(Type type, bool ftz) {
  constexpr bool integer = C <= Cmp::ge;
  switch (type) {
    case Type::f32: return ftz ? plain<compare_flushed<C>>() : plain<compare_lanes<C, float>>();
    case Type::f64: return plain<compare_lanes<C, double>>();
    case Type::f16: return plain<compare_halves<C, Half, -1>>();
    case Type::bf16: return plain<compare_halves<C, BFloat, -1>>();
    case Type::f16x2: return packed<compare_halves<C, Half, 0>, compare_halves<C, Half, 16>>();
    case Type::bf16x2: return packed<compare_halves<C, BFloat, 0>, compare_halves<C, BFloat, 16>>();
    default: break;
  }
  if constexpr (integer) {
    switch (type) {
      case Type::u16:
      case Type::b16: return plain<compare_lanes<C, std::uint16_t>>();
      case Type::s16: return plain<compare_lanes<C, std::int16_t>>();
      case Type::u32:
      case Type::b32: return plain<compare_lanes<C, std::uint32_t>>();
      case Type::s32: return plain<compare_lanes<C, std::int32_t>>();
      case Type::u64:
      case Type::b64: return plain<compare_lanes<C, std::uint64_t>>();
      case Type::s64: return plain<compare_lanes<C, std::int64_t>>();
      default: break;
    }
  }
  return {nullptr, nullptr};
}

Choice choose(std::string_view name, Type type, bool ftz) {
  if (name == "eq") return for_type<Cmp::eq>(type, ftz);
  if (name == "ne") return for_type<Cmp::ne>(type, ftz);
  if (name == "lt" || name == "lo") return for_type<Cmp::lt>(type, ftz);
  if (name == "le" || name == "ls") return for_type<Cmp::le>(type, ftz);
  if (name == "gt" || name == "hi") return for_type<Cmp::gt>(type, ftz);
  if (name == "ge" || name == "hs") return for_type<Cmp::ge>(type, ftz);
  if (name == "equ") return for_type<Cmp::equ>(type, ftz);
  if (name == "neu") return for_type<Cmp::neu>(type, ftz);
  if (name == "ltu") return for_type<Cmp::ltu>(type, ftz);
  if (name == "leu") return for_type<Cmp::leu>(type, ftz);
  if (name == "gtu") return for_type<Cmp::gtu>(type, ftz);
  if (name == "geu") return for_type<Cmp::geu>(type, ftz);
  if (name == "num") return for_type<Cmp::num>(type, ftz);
  if (name == "nan") return for_type<Cmp::nan>(type, ftz);
  return {nullptr, nullptr};
}

// Takes comparison, combination and the type of the operands; sets a, b, c.
Choice take_comparison(Decoder& d, Type type, std::size_t first) {
  const std::string_view name = d.take_any({"eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu",
                                            "ltu", "leu", "gtu", "geu", "num", "nan"});
  const std::string_view combine = d.take_any({"and", "or", "xor"});
  const bool ftz = d.take("ftz");
  d.op.a = d.source(first, type);
  d.op.b = d.source(first + 1, type);
  if (!combine.empty()) {
    const ptx::Operand& c = d.operand(first + 2);
    d.op.c = d.source(c, 1);
    d.op.imm = c.negated ? -1 : 0;
    d.op.mode = static_cast<std::uint16_t>(combine == "and"  ? Combine::and_
                                           : combine == "or" ? Combine::or_
                                                             : Combine::xor_);
  }
  const Choice choice = choose(name, type, ftz);
  if (!choice.predicate) d.fail("this comparison is not known to the simulator");
  return choice;
}

void select_setp(Decoder& d) {
  d.kind = is_float(d.peek_type()) ? Class::float32 : Class::integer;
  const Type type = d.take_type();
  d.op.d = d.predicate(d.operand(0).name);
  if (!d.operand(0).second.empty()) d.op.list = d.list({d.predicate(d.operand(0).second)});
  d.op.run = take_comparison(d, type, 1).predicate;
}

void select_set(Decoder& d) {
  const Type to = d.take_type();
  const Type type = d.take_type();
  d.kind = Class::integer;
  const Choice choice = take_comparison(d, type, 1);
  const bool real = to == Type::f32 || to == Type::f16x2 || to == Type::bf16x2;
  if (width_of(to) != 4) d.fail("this form of set is not known to the simulator");
  d.op.d = d.dest(0, 4);
  d.op.size = real ? 2 : 1;
  d.op.count = type == Type::bf16x2;
  d.op.run = choice.value;
}

template <class T>
void select_value(Warp& w, const Op& op, Mask m) {
  const Mask p = w.pred(op.c);
  const T* a = w.reg<T>(op.a);
  const T* b = w.reg<T>(op.b);
  T* d = w.reg<T>(op.d);
  if (m == kAllLanes) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) d[l] = p >> l & 1 ? a[l] : b[l];
    return;
  }
  for_each_lane(m, [&](int l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}

void select_predicate(Warp& w, const Op& op, Mask m) {
  const Mask p = w.pred(op.c);
  write(w, op.d, m, (w.pred(op.a) & p) | (w.pred(op.b) & ~p));
}

void select_selp(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::integer;
  d.op.c = d.source(3, 1);
  if (type == Type::pred) {
    d.op.d = d.predicate(d.operand(0).name);
    d.op.a = d.source(1, 1);
    d.op.b = d.source(2, 1);
    d.op.run = select_predicate;
    return;
  }
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, type);
  d.op.run = for_width(width_of(type), []<class T>() -> Handler { return select_value<T>; });
}

// slct d, a, b, c: a where c >= 0
void select_slct(Decoder& d) {
  d.take("ftz");
  const Type type = d.take_type(), sign = d.take_type();
  d.kind = Class::integer;
  d.op.d = d.dest(0, type);
  d.op.a = d.source(1, type);
  d.op.b = d.source(2, type);
  d.op.c = d.source(3, 4);
  if (sign == Type::f32)
    d.op.run = for_width(width_of(type), []<class T>() -> Handler {
      return ternary<T, T, T, float, [](T a, T b, float c) { return c >= 0 ? a : b; }>;
    });
  else
    d.op.run = for_width(width_of(type), []<class T>() -> Handler {
      return ternary<T, T, T, std::int32_t, [](T a, T b, std::int32_t c) { return c >= 0 ? a : b; }>;
    });
}

}  // namespace

void add_compare(InstructionTable& t) {
  t["setp"] = select_setp;
  t["set"] = select_set;
  t["selp"] = select_selp;
  t["slct"] = select_slct;
}

}  // namespace gpusim
