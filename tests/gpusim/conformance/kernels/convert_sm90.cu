// cvt, as sm_90 adds to it.
#include "form.cuh"

UNARY(cvt_f32_bf16, "cvt.f32.bf16", b32, b16)
UNARY(cvt_rn_tf32_f32, "cvt.rn.tf32.f32", b32, b32)
UNARY(cvt_rz_tf32_f32, "cvt.rz.tf32.f32", b32, b32)
UNARY(cvt_rn_relu_tf32_f32, "cvt.rn.relu.tf32.f32", b32, b32)
UNARY(cvt_rn_bf16_f16, "cvt.rn.bf16.f16", b16, b16)
UNARY(cvt_rn_f16_bf16, "cvt.rn.f16.bf16", b16, b16)
UNARY(cvt_rn_bf16_s32, "cvt.rn.bf16.s32", b16, b32)
UNARY(cvt_rz_bf16_u32, "cvt.rz.bf16.u32", b16, b32)
UNARY(cvt_rn_bf16_f64, "cvt.rn.bf16.f64", b16, b64)
UNARY(cvt_rzi_s32_bf16, "cvt.rzi.s32.bf16", b32, b16)
UNARY(cvt_rni_bf16_bf16, "cvt.rni.bf16.bf16", b16, b16)
