// cvt: between all pairs of types, and two fp32 packed into one register of halves.
#include <cmath>
#include <limits>
#include <utility>

#include "float_math.h"
#include "handlers.h"

namespace gpusim {

namespace {

// op.mode: rounding; op.flags: what else
enum Flag : std::uint16_t { kFtz = 1, kSat = 2, kToInteger = 4, kRelu = 8, kSatFinite = 16 };

template <class T>
constexpr bool is_half = std::is_same_v<T, Half> || std::is_same_v<T, BFloat>;
template <class T>
constexpr bool is_real = std::is_floating_point_v<T> || is_half<T>;

double round_to_integer(double x, Rounding mode) {
  switch (mode) {
    case Rounding::nearest_even: return std::nearbyint(x);
    case Rounding::zero: return std::trunc(x);
    case Rounding::down: return std::floor(x);
    case Rounding::up: return std::ceil(x);
    case Rounding::nearest_away: return std::round(x);
  }
  return x;
}

template <class A>
double widen(A a) {
  if constexpr (is_half<A>)
    return to_float(a);
  else
    return static_cast<double>(a);
}

template <class D>
D narrow(double x, Rounding mode) {
  if constexpr (std::is_same_v<D, double>)
    return x;
  else if constexpr (std::is_same_v<D, float>)
    return mode == Rounding::nearest_even ? static_cast<float>(x) : round_float(x, mode);
  else
    return from_double<D>(x, mode);
}

template <class D, class A>
D clamp_to(double x, Rounding mode) {
  if (x != x) {  // a NaN gives 0, or the highest bit alone where 64 bits are involved
    if (sizeof(D) < 8 && !std::is_same_v<A, double>) return 0;
    return static_cast<D>(std::make_unsigned_t<D>{1} << (8 * sizeof(D) - 1));
  }
  x = round_to_integer(x, mode);
  constexpr double low = static_cast<double>(std::numeric_limits<D>::min());
  constexpr double high = static_cast<double>(std::numeric_limits<D>::max());
  if (x <= low) return std::numeric_limits<D>::min();
  if (x >= high) return std::numeric_limits<D>::max();
  return static_cast<D>(x);
}

template <class D, class A>
[[gnu::always_inline]] inline D convert(A a, const Op& op) {
  const auto mode = static_cast<Rounding>(op.mode);
  if constexpr (std::is_same_v<A, float>) {
    if (op.flags & kFtz) a = flush(a);
  }
  if constexpr (is_real<D> && is_real<A>) {
    if constexpr (std::is_same_v<D, A>) {
      if (!(op.flags & (kToInteger | kSat | kFtz))) return a;
    }
    if constexpr (std::is_same_v<D, Half> && std::is_same_v<A, float>) {
      if (mode == Rounding::nearest_even && !(op.flags & (kSat | kRelu | kSatFinite))) return to_half(a);
    }
    double x = widen(a);
    if (op.flags & kToInteger) x = round_to_integer(x, mode);
    if (op.flags & kSat) x = saturate(x);
    if ((op.flags & kRelu) && x < 0) x = 0;
    D result = narrow<D>(x, op.flags & kToInteger ? Rounding::nearest_even : mode);
    if constexpr (std::is_same_v<D, float>) {
      if (op.flags & kFtz) result = flush(result);
    }
    if constexpr (is_half<D>) {
      const std::uint16_t infinity = std::is_same_v<D, Half> ? 0x7c00 : 0x7f80;
      if ((op.flags & kSatFinite) && (result.bits & 0x7fff) == infinity) --result.bits;
    }
    return result;
  } else if constexpr (is_real<D>) {
    if constexpr (std::is_floating_point_v<D>) {
      if (mode == Rounding::nearest_even) return static_cast<D>(a);
      return static_cast<D>(with_rounding(mode, [&] {
        volatile A x = a;
        return static_cast<double>(static_cast<D>(x));
      }));
    } else {
      return narrow<D>(static_cast<double>(a), mode);
    }
  } else if constexpr (is_real<A>) {
    return clamp_to<D, A>(widen(a), mode);
  } else {
    if (op.flags & kSat) {
      using Limits = std::numeric_limits<D>;
      if (std::cmp_less(a, Limits::min())) return Limits::min();
      if (std::cmp_greater(a, Limits::max())) return Limits::max();
    }
    return static_cast<D>(a);
  }
}

// Registers may be wider than the type: the low bits are read, and results are extended.
template <class A>
const A* read_lanes(Warp& w, Slot slot, int width, A* buffer) {
  if (width == int{sizeof(A)}) return w.reg<A>(slot);
  for (int l = 0; l < kLanes; ++l)
    std::memcpy(&buffer[l], reinterpret_cast<std::byte*>(w.regs + slot) + l * width, sizeof(A));
  return buffer;
}

template <class D, class R>
void write_extended(Warp& w, Slot slot, Mask m, const D* values) {
  R* d = w.reg<R>(slot);
  if constexpr (std::is_integral_v<D>) for_each_lane(m, [&](int l) { d[l] = static_cast<R>(values[l]); });
}

// op.count: bytes of the destination register, op.size: of the source register
template <class D, class A>
void convert_handler(Warp& w, const Op& op, Mask m) {
  A in[kLanes];
  const A* a = read_lanes<A>(w, op.a, op.size, in);
  const auto f = [&op](A x) { return convert<D, A>(x, op); };
  if (op.count == sizeof(D)) return map_lanes(m, f, w.reg<D>(op.d), a);
  D out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = f(a[l]);
  if (op.count == 2)
    write_extended<D, std::uint16_t>(w, op.d, m, out);
  else if (op.count == 4)
    write_extended<D, std::uint32_t>(w, op.d, m, out);
  else
    write_extended<D, std::uint64_t>(w, op.d, m, out);
}

template <class D>
Handler from_type(Type type) {
  switch (type) {
    case Type::u8:
    case Type::b8: return convert_handler<D, std::uint8_t>;
    case Type::s8: return convert_handler<D, std::int8_t>;
    case Type::u16:
    case Type::b16: return convert_handler<D, std::uint16_t>;
    case Type::s16: return convert_handler<D, std::int16_t>;
    case Type::u32:
    case Type::b32: return convert_handler<D, std::uint32_t>;
    case Type::s32: return convert_handler<D, std::int32_t>;
    case Type::u64:
    case Type::b64: return convert_handler<D, std::uint64_t>;
    case Type::s64: return convert_handler<D, std::int64_t>;
    case Type::f16: return convert_handler<D, Half>;
    case Type::bf16: return convert_handler<D, BFloat>;
    case Type::f32: return convert_handler<D, float>;
    case Type::f64: return convert_handler<D, double>;
    default: return nullptr;
  }
}

Handler conversion(Type to, Type from) {
  switch (to) {
    case Type::u8:
    case Type::b8: return from_type<std::uint8_t>(from);
    case Type::s8: return from_type<std::int8_t>(from);
    case Type::u16:
    case Type::b16: return from_type<std::uint16_t>(from);
    case Type::s16: return from_type<std::int16_t>(from);
    case Type::u32:
    case Type::b32: return from_type<std::uint32_t>(from);
    case Type::s32: return from_type<std::int32_t>(from);
    case Type::u64:
    case Type::b64: return from_type<std::uint64_t>(from);
    case Type::s64: return from_type<std::int64_t>(from);
    case Type::f16: return from_type<Half>(from);
    case Type::bf16: return from_type<BFloat>(from);
    case Type::f32: return from_type<float>(from);
    case Type::f64: return from_type<double>(from);
    default: return nullptr;
  }
}

// d = {high half from a, low half from b}
template <class H>
void pack_handler(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m,
      [&](float a, float b) {
        return static_cast<std::uint32_t>(convert<H, float>(a, op).bits) << 16 | convert<H, float>(b, op).bits;
      },
      w.reg<std::uint32_t>(op.d), w.reg<float>(op.a), w.reg<float>(op.b));
}

void pack_bf16_nearest(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m, [](float a, float b) { return static_cast<std::uint32_t>(to_bfloat(a).bits) << 16 | to_bfloat(b).bits; },
      w.reg<std::uint32_t>(op.d), w.reg<float>(op.a), w.reg<float>(op.b));
}

// The conversions between fp16 and fp32 that matter for speed.
void half_to_float(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](std::uint16_t a) { return to_float(Half{a}); }, w.reg<float>(op.d), w.reg<std::uint16_t>(op.a));
}
void float_to_half(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](float a) { return to_half(a).bits; }, w.reg<std::uint16_t>(op.d), w.reg<float>(op.a));
}
void pack_f16_nearest(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m, [](float a, float b) { return static_cast<std::uint32_t>(to_half(a).bits) << 16 | to_half(b).bits; },
      w.reg<std::uint32_t>(op.d), w.reg<float>(op.a), w.reg<float>(op.b));
}

void float_to_bfloat(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](float a) { return to_bfloat(a).bits; }, w.reg<std::uint16_t>(op.d), w.reg<float>(op.a));
}
void bfloat_to_float(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](std::uint16_t a) { return to_float(BFloat{a}); }, w.reg<float>(op.d), w.reg<std::uint16_t>(op.a));
}

// Low bits of a register twice as wide
void truncate_64(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m, [](std::uint64_t a) { return static_cast<std::uint32_t>(a); }, w.reg<std::uint32_t>(op.d),
      w.reg<std::uint64_t>(op.a));
}

template <bool Ftz>
void saturate_handler(Warp& w, const Op& op, Mask m) {
  map_lanes(m, [](float a) { return saturate(Ftz ? flush(a) : a); }, w.reg<float>(op.d), w.reg<float>(op.a));
}

// fp32 to an integer in fp32
template <Rounding Mode, bool Ftz>
void round_handler(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m,
      [](float a) {
        const float x = Ftz ? flush(a) : a;
        const float r = Mode == Rounding::nearest_even ? std::nearbyint(x)
                        : Mode == Rounding::zero       ? std::trunc(x)
                        : Mode == Rounding::down       ? std::floor(x)
                                                       : std::ceil(x);
        return Ftz ? flush(r) : r;
      },
      w.reg<float>(op.d), w.reg<float>(op.a));
}
template <bool Ftz>
Handler for_rounding(Rounding mode) {
  switch (mode) {
    case Rounding::nearest_even: return round_handler<Rounding::nearest_even, Ftz>;
    case Rounding::zero: return round_handler<Rounding::zero, Ftz>;
    case Rounding::down: return round_handler<Rounding::down, Ftz>;
    case Rounding::up: return round_handler<Rounding::up, Ftz>;
    default: return nullptr;
  }
}

// tf32: fp32 with 10 bits of mantissa
template <Rounding Mode>
void tf32_plain(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m,
      [](std::uint32_t a) {
        const std::uint32_t half = Mode == Rounding::nearest_away   ? 0x1000u
                                   : Mode == Rounding::nearest_even ? 0xfffu + (a >> 13 & 1)
                                                                    : 0u;
        return (a & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : (a + half) & 0xffffe000u;
      },
      w.reg<std::uint32_t>(op.d), w.reg<std::uint32_t>(op.a));
}

void tf32_handler(Warp& w, const Op& op, Mask m) {
  const auto mode = static_cast<Rounding>(op.mode);
  const bool relu = op.flags & kRelu, finite = op.flags & kSatFinite;
  map_lanes(
      m,
      [&](float a) {
        if (a != a) return std::bit_cast<float>(0x7fffffffu);
        if (relu && a < 0) return 0.0f;
        const auto rounded = static_cast<float>(round_to_format(a, 10, -126, 127, mode));
        return finite && std::isinf(rounded) ? std::copysign(std::bit_cast<float>(0x7f7fe000u), rounded) : rounded;
      },
      w.reg<float>(op.d), w.reg<float>(op.a));
}

void select_cvt(Decoder& d) {
  d.kind = Class::conversion;
  const bool integral = d.opcode_has("rni") || d.opcode_has("rzi") || d.opcode_has("rmi") || d.opcode_has("rpi");
  d.op.mode = static_cast<std::uint16_t>(d.take_rounding());
  if (d.take("ftz")) d.op.flags |= kFtz;
  if (d.take("sat")) d.op.flags |= kSat;
  if (d.take("satfinite")) d.op.flags |= kSatFinite;
  if (d.take("relu")) d.op.flags |= kRelu;
  if (integral) d.op.flags |= kToInteger;
  const Type to = d.take_type(), from = d.take_type();
  if (to == Type::f16x2 || to == Type::bf16x2) {
    if (from != Type::f32 || d.operand_count() != 3) d.fail("this conversion is not known to the simulator");
    d.op.d = d.dest(0, 4);
    d.op.a = d.source(1, 4);
    d.op.b = d.source(2, 4);
    const bool plain = d.op.mode == 0 && d.op.flags == 0;
    if (to == Type::f16x2)
      d.op.run = plain ? pack_f16_nearest : pack_handler<Half>;
    else
      d.op.run = plain ? pack_bf16_nearest : pack_handler<BFloat>;
    return;
  }
  if (to == Type::tf32) {
    d.op.d = d.dest(0, 4);
    d.op.a = d.source(1, 4);
    const auto mode = static_cast<Rounding>(d.op.mode);
    d.op.run = d.op.flags                       ? tf32_handler
               : mode == Rounding::nearest_away ? tf32_plain<Rounding::nearest_away>
               : mode == Rounding::nearest_even ? tf32_plain<Rounding::nearest_even>
               : mode == Rounding::zero         ? tf32_plain<Rounding::zero>
                                                : tf32_handler;
    return;
  }
  d.op.run = conversion(to, from);
  if (!d.op.run) d.fail("this conversion is not known to the simulator");
  const int to_width = d.register_width(d.operand(0), width_of(to));
  const int from_width = d.register_width(d.operand(1), std::max(width_of(from), 2));
  d.op.count = static_cast<std::uint8_t>(to_width);
  d.op.size = static_cast<std::uint8_t>(from_width);
  d.op.d = d.dest(0, to_width);
  d.op.a = d.source(1, from_width);
  if (d.op.mode == 0 && d.op.flags == 0) {
    if (to == Type::f16 && from == Type::f32) d.op.run = float_to_half;
    if (to == Type::f32 && from == Type::f16) d.op.run = half_to_float;
    if (to == Type::bf16 && from == Type::f32 && to_width == 2) d.op.run = float_to_bfloat;
    if (to == Type::f32 && from == Type::bf16 && from_width == 2) d.op.run = bfloat_to_float;
  }
  const bool words = (to == Type::u32 || to == Type::s32) && (from == Type::u64 || from == Type::s64);
  if (words && to_width == 4 && from_width == 8 && !(d.op.flags & kSat)) d.op.run = truncate_64;
  if (to == Type::f32 && from == Type::f32 && d.op.flags == kSat) d.op.run = saturate_handler<false>;
  if (to == Type::f32 && from == Type::f32 && d.op.flags == (kSat | kFtz)) d.op.run = saturate_handler<true>;
  if (to == Type::f32 && from == Type::f32 && (d.op.flags & ~kFtz) == kToInteger) {
    const auto mode = static_cast<Rounding>(d.op.mode);
    if (const Handler h = d.op.flags & kFtz ? for_rounding<true>(mode) : for_rounding<false>(mode)) d.op.run = h;
  }
}

}  // namespace

void add_convert(InstructionTable& t) { t["cvt"] = select_cvt; }

}  // namespace gpusim
