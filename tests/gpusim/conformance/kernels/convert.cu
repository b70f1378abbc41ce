// cvt, as sm_80 has it. Arguments: name, text, types of result and source.
#include "form.cuh"

// fp32 to narrower floats
UNARY(cvt_rn_f16_f32, "cvt.rn.f16.f32", b16, b32)
UNARY(cvt_rz_f16_f32, "cvt.rz.f16.f32", b16, b32)
UNARY(cvt_rn_ftz_f16_f32, "cvt.rn.ftz.f16.f32", b16, b32)
UNARY(cvt_rn_sat_f16_f32, "cvt.rn.sat.f16.f32", b16, b32)
UNARY(cvt_rn_relu_f16_f32, "cvt.rn.relu.f16.f32", b16, b32)
UNARY(cvt_rn_bf16_f32, "cvt.rn.bf16.f32", b16, b32)
UNARY(cvt_rz_bf16_f32, "cvt.rz.bf16.f32", b16, b32)
UNARY(cvt_rn_relu_bf16_f32, "cvt.rn.relu.bf16.f32", b16, b32)
UNARY(cvt_rna_tf32_f32, "cvt.rna.tf32.f32", b32, b32)
BINARY(cvt_rn_f16x2_f32, "cvt.rn.f16x2.f32", b32, b32, b32)
BINARY(cvt_rz_f16x2_f32, "cvt.rz.f16x2.f32", b32, b32, b32)
BINARY(cvt_rn_relu_f16x2_f32, "cvt.rn.relu.f16x2.f32", b32, b32, b32)
BINARY(cvt_rn_bf16x2_f32, "cvt.rn.bf16x2.f32", b32, b32, b32)
BINARY(cvt_rz_bf16x2_f32, "cvt.rz.bf16x2.f32", b32, b32, b32)
BINARY(cvt_rn_relu_bf16x2_f32, "cvt.rn.relu.bf16x2.f32", b32, b32, b32)

// between floats
UNARY(cvt_f32_f16, "cvt.f32.f16", b32, b16)
UNARY(cvt_f64_f32, "cvt.f64.f32", b64, b32)
UNARY(cvt_rn_f16_f64, "cvt.rn.f16.f64", b16, b64)
UNARY(cvt_f64_f16, "cvt.f64.f16", b64, b16)
UNARY(cvt_rn_f32_f64, "cvt.rn.f32.f64", b32, b64)
UNARY(cvt_rz_f32_f64, "cvt.rz.f32.f64", b32, b64)
UNARY(cvt_rm_f32_f64, "cvt.rm.f32.f64", b32, b64)
UNARY(cvt_rp_f32_f64, "cvt.rp.f32.f64", b32, b64)
UNARY(cvt_rni_f32_f32, "cvt.rni.f32.f32", b32, b32)
UNARY(cvt_rzi_f32_f32, "cvt.rzi.f32.f32", b32, b32)
UNARY(cvt_rmi_f32_f32, "cvt.rmi.f32.f32", b32, b32)
UNARY(cvt_rpi_f32_f32, "cvt.rpi.f32.f32", b32, b32)
UNARY(cvt_rni_f64_f64, "cvt.rni.f64.f64", b64, b64)
UNARY(cvt_rni_f16_f16, "cvt.rni.f16.f16", b16, b16)
UNARY(cvt_sat_f32_f32, "cvt.sat.f32.f32", b32, b32)
UNARY(cvt_ftz_f32_f32, "cvt.ftz.f32.f32", b32, b32)

// floats to integers, clamped
#define TO_INTEGER(mode)                                         \
  UNARY(cvt_##mode##_s32_f32, "cvt." #mode ".s32.f32", b32, b32) \
  UNARY(cvt_##mode##_u32_f32, "cvt." #mode ".u32.f32", b32, b32) \
  UNARY(cvt_##mode##_s64_f32, "cvt." #mode ".s64.f32", b64, b32) \
  UNARY(cvt_##mode##_u64_f32, "cvt." #mode ".u64.f32", b64, b32) \
  UNARY(cvt_##mode##_s32_f64, "cvt." #mode ".s32.f64", b32, b64) \
  UNARY(cvt_##mode##_u32_f64, "cvt." #mode ".u32.f64", b32, b64) \
  UNARY(cvt_##mode##_s64_f64, "cvt." #mode ".s64.f64", b64, b64) \
  UNARY(cvt_##mode##_u64_f64, "cvt." #mode ".u64.f64", b64, b64) \
  UNARY(cvt_##mode##_s32_f16, "cvt." #mode ".s32.f16", b32, b16)
TO_INTEGER(rni)
TO_INTEGER(rzi)
TO_INTEGER(rmi)
TO_INTEGER(rpi)
UNARY(cvt_rzi_ftz_s32_f32, "cvt.rzi.ftz.s32.f32", b32, b32)
UNARY(cvt_rpi_ftz_s32_f32, "cvt.rpi.ftz.s32.f32", b32, b32)

// integers to floats
#define FROM_INTEGER(mode)                                       \
  UNARY(cvt_##mode##_f32_s32, "cvt." #mode ".f32.s32", b32, b32) \
  UNARY(cvt_##mode##_f32_u32, "cvt." #mode ".f32.u32", b32, b32) \
  UNARY(cvt_##mode##_f32_s64, "cvt." #mode ".f32.s64", b32, b64) \
  UNARY(cvt_##mode##_f32_u64, "cvt." #mode ".f32.u64", b32, b64) \
  UNARY(cvt_##mode##_f64_s64, "cvt." #mode ".f64.s64", b64, b64) \
  UNARY(cvt_##mode##_f64_u64, "cvt." #mode ".f64.u64", b64, b64)
FROM_INTEGER(rn)
FROM_INTEGER(rz)
FROM_INTEGER(rm)
FROM_INTEGER(rp)
UNARY(cvt_rn_f64_s32, "cvt.rn.f64.s32", b64, b32)
UNARY(cvt_rn_f64_u32, "cvt.rn.f64.u32", b64, b32)
UNARY(cvt_rn_f16_s32, "cvt.rn.f16.s32", b16, b32)
UNARY(cvt_rn_f16_u32, "cvt.rn.f16.u32", b16, b32)

// between integers
UNARY(cvt_s32_s8, "cvt.s32.s8", b32, b32)
UNARY(cvt_u32_u8, "cvt.u32.u8", b32, b32)
UNARY(cvt_s32_s16, "cvt.s32.s16", b32, b16)
UNARY(cvt_u32_u16, "cvt.u32.u16", b32, b16)
UNARY(cvt_s64_s32, "cvt.s64.s32", b64, b32)
UNARY(cvt_u64_u32, "cvt.u64.u32", b64, b32)
UNARY(cvt_u32_u64, "cvt.u32.u64", b32, b64)
UNARY(cvt_u16_u32, "cvt.u16.u32", b16, b32)
UNARY(cvt_sat_s8_s32, "cvt.sat.s8.s32", b32, b32)
UNARY(cvt_sat_u8_s32, "cvt.sat.u8.s32", b32, b32)
UNARY(cvt_sat_s16_s32, "cvt.sat.s16.s32", b16, b32)
UNARY(cvt_sat_u16_s32, "cvt.sat.u16.s32", b16, b32)
UNARY(cvt_sat_s32_s64, "cvt.sat.s32.s64", b32, b64)
UNARY(cvt_sat_u32_s64, "cvt.sat.u32.s64", b32, b64)
