// Arithmetic of fp16 and bf16, single and packed in pairs. Every operation rounds once to the 16-bit format.
#include <limits>

#include "float_math.h"
#include "handlers.h"

namespace gpusim {

namespace {

enum class Fn { add, sub, mul, fma, min, max, min_nan, max_nan, abs, neg, ex2, tanh };

// Sums and products of two 16-bit numbers are exact in fp64, or rounded to odd there.
template <Fn F, class H>
H calculate(H a, H b, H c) {
  if constexpr (F == Fn::abs) return {static_cast<std::uint16_t>(a.bits & 0x7fff)};
  if constexpr (F == Fn::neg) return {static_cast<std::uint16_t>(a.bits ^ 0x8000)};
  const float x = to_float(a), y = to_float(b), z = to_float(c);
  if constexpr (std::is_same_v<H, Half>) {  // fp32 is wide enough to round twice without harm
    if constexpr (F == Fn::add) return from_float<H>(x + y);
    if constexpr (F == Fn::sub) return from_float<H>(x - y);
  } else {
    if constexpr (F == Fn::add) return from_double<H>(add_to_odd(x, y), Rounding::nearest_even);
    if constexpr (F == Fn::sub) return from_double<H>(add_to_odd(x, -y), Rounding::nearest_even);
  }
  if constexpr (F == Fn::mul) return from_float<H>(x * y);  // exact in fp32
  if constexpr (F == Fn::fma) return from_double<H>(add_to_odd(static_cast<double>(x) * y, z), Rounding::nearest_even);
  if constexpr (F == Fn::min) return from_float<H>(min_number(x, y));
  if constexpr (F == Fn::max) return from_float<H>(max_number(x, y));
  if constexpr (F == Fn::min_nan) return from_float<H>(min_nan(x, y));
  if constexpr (F == Fn::max_nan) return from_float<H>(max_nan(x, y));
  if constexpr (F == Fn::ex2) return from_float<H>(std::exp2(x));
  if constexpr (F == Fn::tanh) return from_float<H>(std::tanh(x));
  return {};
}

template <class H>
H finish(H r, bool sat, bool relu) {
  const float value = to_float(r);
  if (relu && value != value) return {0x7fff};
  if ((sat || relu) && !(value > 0)) return {0};
  if (sat && value > 1) return from_float<H>(1.0f);
  return r;
}

template <class H>
std::uint16_t flush_half(std::uint16_t bits) {  // subnormals become zero, with their sign
  constexpr std::uint16_t exponent = std::is_same_v<H, Half> ? 0x7c00 : 0x7f80;
  return bits & exponent ? bits : static_cast<std::uint16_t>(bits & 0x8000);
}

// op.flags: bit 0 .sat, bit 1 .relu, bit 2 .ftz
template <Fn F, class H, class Lane>
void half_handler(Warp& w, const Op& op, Mask m) {
  const bool sat = op.flags & 1, relu = op.flags & 2, ftz = op.flags & 4;
  const auto one = [&](std::uint16_t a, std::uint16_t b, std::uint16_t c) {
    if (ftz) a = flush_half<H>(a), b = flush_half<H>(b), c = flush_half<H>(c);
    H r = calculate<F, H>({a}, {b}, {c});
    if (ftz) r.bits = flush_half<H>(r.bits);
    return sat || relu ? finish(r, sat, relu).bits : r.bits;
  };
  map_lanes(
      m,
      [&](Lane a, Lane b, Lane c) -> Lane {
        const std::uint16_t low =
            one(static_cast<std::uint16_t>(a), static_cast<std::uint16_t>(b), static_cast<std::uint16_t>(c));
        if constexpr (sizeof(Lane) == 2)
          return low;
        else
          return low | static_cast<Lane>(one(static_cast<std::uint16_t>(a >> 16), static_cast<std::uint16_t>(b >> 16),
                                             static_cast<std::uint16_t>(c >> 16)))
                           << 16;
      },
      w.reg<Lane>(op.d), w.reg<Lane>(op.a), w.reg<Lane>(op.b), w.reg<Lane>(op.c));
}

template <Fn F>
void select_half(Decoder& d) {
  d.ignore({"rn", "approx"});
  d.op.flags = static_cast<std::uint16_t>(d.take("sat") | d.take("relu") << 1 | d.take("ftz") << 2);
  const Type type = d.take_type();
  d.kind = F == Fn::ex2 || F == Fn::tanh ? Class::special_function : Class::half;
  same_width_operands(d, width_of(type));
  if (d.operand_count() < 3) d.op.b = d.op.a;
  if (d.operand_count() < 4) d.op.c = d.op.b;
  switch (type) {
    case Type::f16: d.op.run = half_handler<F, Half, std::uint16_t>; break;
    case Type::bf16: d.op.run = half_handler<F, BFloat, std::uint16_t>; break;
    case Type::f16x2: d.op.run = half_handler<F, Half, std::uint32_t>; break;
    case Type::bf16x2: d.op.run = half_handler<F, BFloat, std::uint32_t>; break;
    default: d.fail("not a 16-bit floating point type");
  }
}

template <bool Max>
void select_minmax(Decoder& d) {
  if (d.take("NaN"))
    select_half<Max ? Fn::max_nan : Fn::min_nan>(d);
  else
    select_half<Max ? Fn::max : Fn::min>(d);
}

}  // namespace

void half_arithmetic(Decoder& d) {
  static const InstructionTable table = {{"add", select_half<Fn::add>}, {"sub", select_half<Fn::sub>},
                                         {"mul", select_half<Fn::mul>}, {"fma", select_half<Fn::fma>},
                                         {"abs", select_half<Fn::abs>}, {"neg", select_half<Fn::neg>},
                                         {"min", select_minmax<false>}, {"max", select_minmax<true>},
                                         {"ex2", select_half<Fn::ex2>}, {"tanh", select_half<Fn::tanh>}};
  const auto found = table.find(d.opcode());
  if (found == table.end()) d.fail("not an instruction of fp16 or bf16");
  found->second(d);
}

}  // namespace gpusim
