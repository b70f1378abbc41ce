// Arithmetic of fp32 and fp64.
#include "float_math.h"
#include "handlers.h"

namespace gpusim {

namespace {

enum class Fn { add, sub, mul, fma, div, min, max, min_nan, max_nan };

template <Fn F, class T>
[[gnu::always_inline]] inline T nearest(T a, T b, T c) {
  if constexpr (F == Fn::add) return a + b;
  if constexpr (F == Fn::sub) return a - b;
  if constexpr (F == Fn::mul) return a * b;
  if constexpr (F == Fn::fma) return std::fma(a, b, c);
  if constexpr (F == Fn::div) return a / b;
  if constexpr (F == Fn::min) return min_number(a, b);
  if constexpr (F == Fn::max) return max_number(a, b);
  if constexpr (F == Fn::min_nan) return min_nan(a, b);
  if constexpr (F == Fn::max_nan) return max_nan(a, b);
}

template <Fn F>
float directed(float a, float b, float c, Rounding mode) {
  if constexpr (F == Fn::add) return add_directed(a, b, mode);
  if constexpr (F == Fn::sub) return add_directed(a, -b, mode);
  if constexpr (F == Fn::mul) return mul_directed(a, b, mode);
  if constexpr (F == Fn::fma) return fma_directed(a, b, c, mode);
  if constexpr (F == Fn::div) return div_directed(a, b, mode);
  return 0;
}

template <Fn F>
double directed(double a, double b, double c, Rounding mode) {
  return with_rounding(mode, [&] {
    volatile double x = a, y = b, z = c;
    return nearest<F, double>(x, y, z);
  });
}

template <Fn F, class T, bool Ftz, bool Sat>
void nearest_handler(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m,
      [](T a, T b, T c) {
        if constexpr (Ftz) a = flush(a), b = flush(b), c = flush(c);
        T r = nearest<F, T>(a, b, c);
        if constexpr (Ftz) r = flush(r);
        if constexpr (Sat) r = saturate(r);
        return r;
      },
      w.reg<T>(op.d), w.reg<T>(op.a), w.reg<T>(op.b), w.reg<T>(op.c));
}

// op.mode holds the rounding; op.flags bit 0 .ftz, bit 1 .sat
template <Fn F, class T>
void directed_handler(Warp& w, const Op& op, Mask m) {
  const auto mode = static_cast<Rounding>(op.mode);
  const bool ftz = op.flags & 1, sat = op.flags & 2;
  map_lanes(
      m,
      [&](T a, T b, T c) {
        if (ftz) a = flush(a), b = flush(b), c = flush(c);
        T r = directed<F>(a, b, c, mode);
        if (ftz) r = flush(r);
        return sat ? saturate(r) : r;
      },
      w.reg<T>(op.d), w.reg<T>(op.a), w.reg<T>(op.b), w.reg<T>(op.c));
}

void fma_down_handler(Warp& w, const Op& op, Mask m) {  // of the exponential function of CUDA
  map_lanes(m, fma_down, w.reg<float>(op.d), w.reg<float>(op.a), w.reg<float>(op.b), w.reg<float>(op.c));
}

template <Fn F>
void select_fn(Decoder& d) {
  const bool approximate = d.take("approx") || d.take("full");
  const Rounding mode = d.take_rounding();
  const bool ftz = d.take("ftz"), sat = d.take("sat");
  const Type type = d.take_type();
  const int width = width_of(type);
  d.kind = type == Type::f64 ? Class::float64 : approximate ? Class::special_function : Class::float32;
  same_width_operands(d, width);
  if (d.operand_count() < 4) d.op.c = d.op.b;
  d.op.mode = static_cast<std::uint16_t>(mode);
  d.op.flags = static_cast<std::uint16_t>(ftz | sat << 1);
  const bool plain = mode == Rounding::nearest_even;
  if (type == Type::f64) {
    d.op.run = plain ? nearest_handler<F, double, false, false> : directed_handler<F, double>;
  } else if (!plain) {
    d.op.run = F == Fn::fma && mode == Rounding::down && !ftz && !sat ? fma_down_handler : directed_handler<F, float>;
  } else if (ftz) {
    d.op.run = sat ? nearest_handler<F, float, true, true> : nearest_handler<F, float, true, false>;
  } else {
    d.op.run = sat ? nearest_handler<F, float, false, true> : nearest_handler<F, float, false, false>;
  }
}

template <bool Max>
void select_minmax(Decoder& d) {
  if (d.operand_count() == 4) d.fail("three-input min and max are not known to the simulator");
  if (d.take("NaN"))
    select_fn<Max ? Fn::max_nan : Fn::min_nan>(d);
  else
    select_fn<Max ? Fn::max : Fn::min>(d);
}

// One operand. F takes and gives T.
template <class T, auto F, bool Ftz>
void one_operand(Warp& w, const Op& op, Mask m) {
  map_lanes(
      m,
      [](T a) {
        if constexpr (Ftz)
          return static_cast<T>(flush(F(flush(a))));
        else
          return static_cast<T>(F(a));
      },
      w.reg<T>(op.d), w.reg<T>(op.a));
}

float absolute(float a) { return std::bit_cast<float>(std::bit_cast<std::uint32_t>(a) & 0x7fffffffu); }
double absolute(double a) { return std::fabs(a); }
template <class T>
T negate(T a) {
  return -a;
}
template <class T>
T absolute_of(T a) {
  return absolute(a);
}
template <class T>
T reciprocal(T a) {
  return T{1} / a;
}
template <class T>
T square_root(T a) {
  return std::sqrt(a);
}
float reciprocal_root(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
double reciprocal_root64(double a) { return 1.0 / std::sqrt(a); }
float sine(float a) { return static_cast<float>(std::sin(static_cast<double>(a))); }
float cosine(float a) { return static_cast<float>(std::cos(static_cast<double>(a))); }
float log2_of(float a) { return static_cast<float>(std::log2(static_cast<double>(a))); }
float tangent_h(float a) { return static_cast<float>(std::tanh(static_cast<double>(a))); }

// 2^x: the integer part goes into the exponent, the fraction through a polynomial in fp64 (error below 2^-40).
[[gnu::always_inline]] inline float power_of_two(float a) {
  const float clamped = a > 200.0f ? 200.0f : (a < -200.0f ? -200.0f : a);
  const auto x = static_cast<double>(clamped == clamped ? clamped : 0.0f);
  const double shifted = x + 0x1.8p52;
  const double n = shifted - 0x1.8p52;
  const double f = (x - n) * 0.693147180559945309417;
  double p = 1.0 / 3628800;
  p = p * f + 1.0 / 362880;
  p = p * f + 1.0 / 40320;
  p = p * f + 1.0 / 5040;
  p = p * f + 1.0 / 720;
  p = p * f + 1.0 / 120;
  p = p * f + 1.0 / 24;
  p = p * f + 1.0 / 6;
  p = p * f + 0.5;
  p = p * f + 1.0;
  p = p * f + 1.0;
  const std::uint64_t exponent = (std::bit_cast<std::uint64_t>(shifted) + 1023) << 52;  // low bits of shifted: n
  const auto result = static_cast<float>(p * std::bit_cast<double>(exponent));
  return a == a ? result : a;
}

template <auto F32, auto F64>
void select_one(Decoder& d) {
  const bool approximate = d.take("approx");
  const Rounding mode = d.take_rounding();
  const bool ftz = d.take("ftz");
  const Type type = d.take_type();
  d.kind = type == Type::f64 ? Class::float64 : approximate ? Class::special_function : Class::float32;
  same_width_operands(d, width_of(type));
  if (mode != Rounding::nearest_even) d.fail("this rounding mode is not known to the simulator");
  if (type == Type::f64)
    d.op.run = one_operand<double, F64, false>;
  else
    d.op.run = ftz ? one_operand<float, F32, true> : one_operand<float, F32, false>;
}

template <bool Root>
void directed_one(Warp& w, const Op& op, Mask m) {
  const auto mode = static_cast<Rounding>(op.mode);
  map_lanes(
      m, [&](float a) { return Root ? sqrt_directed(a, mode) : div_directed(1.0f, a, mode); }, w.reg<float>(op.d),
      w.reg<float>(op.a));
}

template <bool Root>
void select_rcp_sqrt(Decoder& d) {
  if (d.peek_type() == Type::f32 && (d.opcode_has("rz") || d.opcode_has("rm") || d.opcode_has("rp"))) {
    d.op.mode = static_cast<std::uint16_t>(d.take_rounding());
    d.take("ftz");
    d.take_type();
    d.kind = Class::float32;
    same_width_operands(d, 4);
    d.op.run = directed_one<Root>;
    return;
  }
  if constexpr (Root)
    select_one<square_root<float>, square_root<double>>(d);
  else
    select_one<reciprocal<float>, reciprocal<double>>(d);
}

void select_copysign(Decoder& d) {
  const Type type = d.take_type();
  d.kind = Class::float32;
  same_width_operands(d, width_of(type));  // copysign d, a, b: the sign of a, the magnitude of b
  if (type == Type::f64)
    d.op.run = binary<double, double, double, [](double a, double b) { return std::copysign(b, a); }>;
  else
    d.op.run = binary<float, float, float, [](float a, float b) { return std::copysign(b, a); }>;
}

enum class Test { finite, infinite, number, notanumber, normal, subnormal };

template <class T, Test Which>
void test_property(Warp& w, const Op& op, Mask m) {
  const Mask holds = lanes_where(
      [](T a) {
        switch (Which) {
          case Test::finite: return std::isfinite(a);
          case Test::infinite: return std::isinf(a);
          case Test::number: return !std::isnan(a);
          case Test::notanumber: return std::isnan(a);
          case Test::normal: return std::isnormal(a);
          case Test::subnormal: return std::fpclassify(a) == FP_SUBNORMAL;
        }
        return false;
      },
      w.reg<T>(op.a));
  Mask& d = w.pred(op.d);
  d = (d & ~m) | (holds & m);
}

template <Test Which>
void select_test(Decoder& d, Type type) {
  d.op.run = type == Type::f64 ? test_property<double, Which> : test_property<float, Which>;
}

void select_testp(Decoder& d) {
  const std::string_view which = d.take_any({"finite", "infinite", "number", "notanumber", "normal", "subnormal"});
  const Type type = d.take_type();
  d.kind = Class::float32;
  d.op.d = d.predicate(d.operand(0).name);
  d.op.a = d.source(1, type);
  if (which == "finite")
    select_test<Test::finite>(d, type);
  else if (which == "infinite")
    select_test<Test::infinite>(d, type);
  else if (which == "number")
    select_test<Test::number>(d, type);
  else if (which == "notanumber")
    select_test<Test::notanumber>(d, type);
  else if (which == "normal")
    select_test<Test::normal>(d, type);
  else
    select_test<Test::subnormal>(d, type);
}

double unknown64(double) { return std::nan(""); }

}  // namespace

void float_arithmetic(Decoder& d) {
  static const InstructionTable table = {{"add", select_fn<Fn::add>},
                                         {"sub", select_fn<Fn::sub>},
                                         {"mul", select_fn<Fn::mul>},
                                         {"fma", select_fn<Fn::fma>},
                                         {"mad", select_fn<Fn::fma>},
                                         {"div", select_fn<Fn::div>},
                                         {"min", select_minmax<false>},
                                         {"max", select_minmax<true>},
                                         {"abs", select_one<absolute_of<float>, absolute_of<double>>},
                                         {"neg", select_one<negate<float>, negate<double>>},
                                         {"ex2", select_one<power_of_two, unknown64>},
                                         {"tanh", select_one<tangent_h, unknown64>}};
  const auto found = table.find(d.opcode());
  if (found == table.end()) d.fail("not an instruction of fp32 or fp64");
  found->second(d);
}

void add_float(InstructionTable& t) {
  t["rcp"] = select_rcp_sqrt<false>;
  t["sqrt"] = select_rcp_sqrt<true>;
  t["rsqrt"] = select_one<reciprocal_root, reciprocal_root64>;
  t["sin"] = select_one<sine, unknown64>;
  t["cos"] = select_one<cosine, unknown64>;
  t["lg2"] = select_one<log2_of, unknown64>;
  t["copysign"] = select_copysign;
  t["testp"] = select_testp;
}

}  // namespace gpusim
