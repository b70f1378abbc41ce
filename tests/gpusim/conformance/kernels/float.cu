// Arithmetic on fp32 and fp64: exact forms to the bit, approximate ones within their stated error.
#include "form.cuh"

#define ROUNDED(mode)                                                \
  BINARY(add_##mode##_f32, "add." #mode ".f32", b32, b32, b32)       \
  BINARY(sub_##mode##_f32, "sub." #mode ".f32", b32, b32, b32)       \
  BINARY(mul_##mode##_f32, "mul." #mode ".f32", b32, b32, b32)       \
  TERNARY(fma_##mode##_f32, "fma." #mode ".f32", b32, b32, b32, b32) \
  BINARY(add_##mode##_f64, "add." #mode ".f64", b64, b64, b64)       \
  BINARY(mul_##mode##_f64, "mul." #mode ".f64", b64, b64, b64)       \
  TERNARY(fma_##mode##_f64, "fma." #mode ".f64", b64, b64, b64, b64) \
  BINARY(div_##mode##_f32, "div." #mode ".f32", b32, b32, b32)       \
  UNARY(rcp_##mode##_f32, "rcp." #mode ".f32", b32, b32)             \
  UNARY(sqrt_##mode##_f32, "sqrt." #mode ".f32", b32, b32)
ROUNDED(rn)
ROUNDED(rz)
ROUNDED(rm)
ROUNDED(rp)
BINARY(add_rn_ftz_f32, "add.rn.ftz.f32", b32, b32, b32)
BINARY(mul_rn_ftz_f32, "mul.rn.ftz.f32", b32, b32, b32)
TERNARY(fma_rn_ftz_f32, "fma.rn.ftz.f32", b32, b32, b32, b32)
BINARY(add_rn_sat_f32, "add.rn.sat.f32", b32, b32, b32)
TERNARY(fma_rn_ftz_sat_f32, "fma.rn.ftz.sat.f32", b32, b32, b32, b32)
BINARY(div_rn_f64, "div.rn.f64", b64, b64, b64)
UNARY(rcp_rn_f64, "rcp.rn.f64", b64, b64)
UNARY(sqrt_rn_f64, "sqrt.rn.f64", b64, b64)

BINARY(min_f32, "min.f32", b32, b32, b32)
BINARY(max_f32, "max.f32", b32, b32, b32)
BINARY(min_NaN_f32, "min.NaN.f32", b32, b32, b32)
BINARY(max_NaN_f32, "max.NaN.f32", b32, b32, b32)
BINARY(min_ftz_f32, "min.ftz.f32", b32, b32, b32)
BINARY(max_ftz_f32, "max.ftz.f32", b32, b32, b32)
BINARY(min_f64, "min.f64", b64, b64, b64)
BINARY(max_f64, "max.f64", b64, b64, b64)
UNARY(abs_f32, "abs.f32", b32, b32)
UNARY(neg_f32, "neg.f32", b32, b32)
UNARY(abs_ftz_f32, "abs.ftz.f32", b32, b32)
UNARY(neg_ftz_f32, "neg.ftz.f32", b32, b32)
UNARY(abs_f64, "abs.f64", b64, b64)
UNARY(neg_f64, "neg.f64", b64, b64)
BINARY(copysign_f32, "copysign.f32", b32, b32, b32)
BINARY(copysign_f64, "copysign.f64", b64, b64, b64)

UNARY(ex2_approx_f32, "ex2.approx.f32", b32, b32)
UNARY(ex2_approx_ftz_f32, "ex2.approx.ftz.f32", b32, b32)
UNARY(lg2_approx_f32, "lg2.approx.f32", b32, b32)
UNARY(lg2_approx_ftz_f32, "lg2.approx.ftz.f32", b32, b32)
UNARY(rcp_approx_f32, "rcp.approx.f32", b32, b32)
UNARY(rcp_approx_ftz_f32, "rcp.approx.ftz.f32", b32, b32)
UNARY(sqrt_approx_f32, "sqrt.approx.f32", b32, b32)
UNARY(sqrt_approx_ftz_f32, "sqrt.approx.ftz.f32", b32, b32)
UNARY(rsqrt_approx_f32, "rsqrt.approx.f32", b32, b32)
UNARY(rsqrt_approx_ftz_f32, "rsqrt.approx.ftz.f32", b32, b32)
UNARY(tanh_approx_f32, "tanh.approx.f32", b32, b32)
UNARY(sin_approx_f32, "sin.approx.f32", b32, b32)
UNARY(cos_approx_f32, "cos.approx.f32", b32, b32)
BINARY(div_approx_f32, "div.approx.f32", b32, b32, b32)
BINARY(div_full_f32, "div.full.f32", b32, b32, b32)

// Comparisons: 1 where the predicate holds.
#define COMPARE(name, text, A)                                                     \
  extern "C" __global__ void name(const A* a, const A* b, b32* out) {              \
    b32 d;                                                                         \
    asm volatile("{\n.reg .pred p;\n" text " p, %1, %2;\nselp.b32 %0, 1, 0, p;\n}" \
                 : "=r"(d)                                                         \
                 : REG_##A(a[INDEX]), REG_##A(b[INDEX]));                          \
    out[INDEX] = d;                                                                \
  }
#define COMPARE_F32(how) COMPARE(setp_##how##_f32, "setp." #how ".f32", b32)
COMPARE_F32(eq)
COMPARE_F32(ne)
COMPARE_F32(lt)
COMPARE_F32(le)
COMPARE_F32(gt)
COMPARE_F32(ge)
COMPARE_F32(equ)
COMPARE_F32(neu)
COMPARE_F32(ltu)
COMPARE_F32(leu)
COMPARE_F32(gtu)
COMPARE_F32(geu)
COMPARE_F32(num)
COMPARE_F32(nan)
COMPARE(setp_lt_ftz_f32, "setp.lt.ftz.f32", b32)
COMPARE(setp_lt_f64, "setp.lt.f64", b64)
COMPARE(setp_neu_f64, "setp.neu.f64", b64)
