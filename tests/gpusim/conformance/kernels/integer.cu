// Integers and bits.
#include <utility>

#include "form.cuh"

#define SIGNED_AND_UNSIGNED(op)               \
  BINARY(op##_s32, #op ".s32", b32, b32, b32) \
  BINARY(op##_u32, #op ".u32", b32, b32, b32) \
  BINARY(op##_s64, #op ".s64", b64, b64, b64) \
  BINARY(op##_u64, #op ".u64", b64, b64, b64) \
  BINARY(op##_s16, #op ".s16", b16, b16, b16) \
  BINARY(op##_u16, #op ".u16", b16, b16, b16)
SIGNED_AND_UNSIGNED(min)
SIGNED_AND_UNSIGNED(max)
SIGNED_AND_UNSIGNED(div)
SIGNED_AND_UNSIGNED(rem)
BINARY(add_s32, "add.s32", b32, b32, b32)
BINARY(add_sat_s32, "add.sat.s32", b32, b32, b32)
BINARY(sub_sat_s32, "sub.sat.s32", b32, b32, b32)
BINARY(sub_s64, "sub.s64", b64, b64, b64)
BINARY(add_u16, "add.u16", b16, b16, b16)

#define PRODUCTS(type, B)                             \
  BINARY(mul_lo_##type, "mul.lo." #type, B, B, B)     \
  BINARY(mul_hi_##type, "mul.hi." #type, B, B, B)     \
  TERNARY(mad_lo_##type, "mad.lo." #type, B, B, B, B) \
  TERNARY(mad_hi_##type, "mad.hi." #type, B, B, B, B)
PRODUCTS(s32, b32)
PRODUCTS(u32, b32)
PRODUCTS(s64, b64)
PRODUCTS(u64, b64)
PRODUCTS(s16, b16)
PRODUCTS(u16, b16)
BINARY(mul_wide_s32, "mul.wide.s32", b64, b32, b32)
BINARY(mul_wide_u32, "mul.wide.u32", b64, b32, b32)
BINARY(mul_wide_s16, "mul.wide.s16", b32, b16, b16)
BINARY(mul_wide_u16, "mul.wide.u16", b32, b16, b16)
TERNARY(mad_wide_s32, "mad.wide.s32", b64, b32, b32, b64)
TERNARY(mad_wide_u32, "mad.wide.u32", b64, b32, b32, b64)
TERNARY(mad_wide_s16, "mad.wide.s16", b32, b16, b16, b32)
TERNARY(mad_wide_u16, "mad.wide.u16", b32, b16, b16, b32)
TERNARY(sad_s32, "sad.s32", b32, b32, b32, b32)
TERNARY(sad_u32, "sad.u32", b32, b32, b32, b32)
TERNARY(dp4a_s32_s32, "dp4a.s32.s32", b32, b32, b32, b32)
TERNARY(dp4a_u32_s32, "dp4a.u32.s32", b32, b32, b32, b32)

UNARY(abs_s32, "abs.s32", b32, b32)
UNARY(neg_s32, "neg.s32", b32, b32)
UNARY(abs_s64, "abs.s64", b64, b64)
UNARY(not_b32, "not.b32", b32, b32)
UNARY(cnot_b32, "cnot.b32", b32, b32)
UNARY(popc_b32, "popc.b32", b32, b32)
UNARY(popc_b64, "popc.b64", b32, b64)
UNARY(clz_b32, "clz.b32", b32, b32)
UNARY(clz_b64, "clz.b64", b32, b64)
UNARY(brev_b32, "brev.b32", b32, b32)
UNARY(brev_b64, "brev.b64", b64, b64)
UNARY(bfind_u32, "bfind.u32", b32, b32)
UNARY(bfind_s32, "bfind.s32", b32, b32)
UNARY(bfind_u64, "bfind.u64", b32, b64)
UNARY(bfind_s64, "bfind.s64", b32, b64)
UNARY(bfind_shiftamt_u32, "bfind.shiftamt.u32", b32, b32)
BINARY(and_b32, "and.b32", b32, b32, b32)
BINARY(or_b64, "or.b64", b64, b64, b64)
BINARY(xor_b16, "xor.b16", b16, b16, b16)

BINARY(shl_b32, "shl.b32", b32, b32, b32)
BINARY(shl_b64, "shl.b64", b64, b64, b32)
BINARY(shl_b16, "shl.b16", b16, b16, b32)
BINARY(shr_u32, "shr.u32", b32, b32, b32)
BINARY(shr_s32, "shr.s32", b32, b32, b32)
BINARY(shr_u64, "shr.u64", b64, b64, b32)
BINARY(shr_s64, "shr.s64", b64, b64, b32)
BINARY(shr_s16, "shr.s16", b16, b16, b32)
TERNARY(shf_l_wrap_b32, "shf.l.wrap.b32", b32, b32, b32, b32)
TERNARY(shf_r_wrap_b32, "shf.r.wrap.b32", b32, b32, b32, b32)
TERNARY(shf_l_clamp_b32, "shf.l.clamp.b32", b32, b32, b32, b32)
TERNARY(shf_r_clamp_b32, "shf.r.clamp.b32", b32, b32, b32, b32)

TERNARY(bfe_u32, "bfe.u32", b32, b32, b32, b32)
TERNARY(bfe_s32, "bfe.s32", b32, b32, b32, b32)
TERNARY(bfe_u64, "bfe.u64", b64, b64, b32, b32)
TERNARY(bfe_s64, "bfe.s64", b64, b64, b32, b32)
QUATERNARY(bfi_b32, "bfi.b32", b32, b32, b32, b32, b32)
QUATERNARY(bfi_b64, "bfi.b64", b64, b64, b64, b32, b32)

TERNARY(prmt_b32, "prmt.b32", b32, b32, b32, b32)
TERNARY(prmt_b32_f4e, "prmt.b32.f4e", b32, b32, b32, b32)
TERNARY(prmt_b32_b4e, "prmt.b32.b4e", b32, b32, b32, b32)
TERNARY(prmt_b32_rc8, "prmt.b32.rc8", b32, b32, b32, b32)
TERNARY(prmt_b32_ecl, "prmt.b32.ecl", b32, b32, b32, b32)
TERNARY(prmt_b32_ecr, "prmt.b32.ecr", b32, b32, b32, b32)
TERNARY(prmt_b32_rc16, "prmt.b32.rc16", b32, b32, b32, b32)
TERNARY(slct_b32_s32, "slct.b32.s32", b32, b32, b32, b32)

// Every table of lop3, one after the other: out[table][i].
template <int... kTable>
__device__ void lop3_tables(b32 a, b32 b, b32 c, b32* out, std::integer_sequence<int, kTable...>) {
  const int n = gridDim.x * blockDim.x;
  (
      [&] {
        b32 d;
        asm volatile("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
        out[kTable * n + INDEX] = d;
      }(),
      ...);
}
extern "C" __global__ void lop3_b32(const b32* a, const b32* b, const b32* c, b32* out) {
  lop3_tables(a[INDEX], b[INDEX], c[INDEX], out, std::make_integer_sequence<int, 256>{});
}

// 96-bit sums and products by carry.
extern "C" __global__ void add_cc(const b32* a, const b32* b, b32* out) {
  a += INDEX * 3, b += INDEX * 3, out += INDEX * 3;
  b32 d[3];
  asm volatile("add.cc.u32 %0, %3, %6;\naddc.cc.u32 %1, %4, %7;\naddc.u32 %2, %5, %8;"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(b[0]), "r"(b[1]), "r"(b[2]));
  for (int i = 0; i < 3; ++i) out[i] = d[i];
}
extern "C" __global__ void sub_cc(const b32* a, const b32* b, b32* out) {
  a += INDEX * 3, b += INDEX * 3, out += INDEX * 3;
  b32 d[3];
  asm volatile("sub.cc.u32 %0, %3, %6;\nsubc.cc.u32 %1, %4, %7;\nsubc.u32 %2, %5, %8;"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(b[0]), "r"(b[1]), "r"(b[2]));
  for (int i = 0; i < 3; ++i) out[i] = d[i];
}
extern "C" __global__ void mad_cc(const b32* a, const b32* b, const b32* c,
                                  b32* out) {  // {hi, lo} = a b + c, c 64 bits
  b32 low, high;
  asm volatile("mad.lo.cc.u32 %0, %2, %3, %4;\nmadc.hi.u32 %1, %2, %3, %5;"
               : "=&r"(low), "=r"(high)
               : "r"(a[INDEX]), "r"(b[INDEX]), "r"(c[INDEX * 2]), "r"(c[INDEX * 2 + 1]));
  out[INDEX * 2] = low, out[INDEX * 2 + 1] = high;
}
