// fp16 and bf16, scalar and packed in pairs, as sm_80 has them.
#include "form.cuh"

#define BOTH_1(name, text, type)                 \
  UNARY(name##_##type, text "." #type, b16, b16) \
  UNARY(name##_##type##x2, text "." #type "x2", b32, b32)
#define BOTH_2(name, text, type)                       \
  BINARY(name##_##type, text "." #type, b16, b16, b16) \
  BINARY(name##_##type##x2, text "." #type "x2", b32, b32, b32)
#define BOTH_3(name, text, type)                             \
  TERNARY(name##_##type, text "." #type, b16, b16, b16, b16) \
  TERNARY(name##_##type##x2, text "." #type "x2", b32, b32, b32, b32)

BOTH_2(add_rn, "add.rn", f16)
BOTH_2(sub_rn, "sub.rn", f16)
BOTH_2(mul_rn, "mul.rn", f16)
BOTH_3(fma_rn, "fma.rn", f16)
BOTH_2(add_ftz, "add.ftz", f16)
BOTH_2(mul_ftz, "mul.ftz", f16)
BOTH_2(add_sat, "add.sat", f16)
BOTH_2(mul_sat, "mul.sat", f16)
BOTH_3(fma_rn_ftz, "fma.rn.ftz", f16)
BOTH_3(fma_rn_sat, "fma.rn.sat", f16)
BOTH_3(fma_rn_relu, "fma.rn.relu", f16)
BOTH_2(min, "min", f16)
BOTH_2(max, "max", f16)
BOTH_2(min_NaN, "min.NaN", f16)
BOTH_2(max_NaN, "max.NaN", f16)
BOTH_2(max_ftz, "max.ftz", f16)
BOTH_1(neg, "neg", f16)
BOTH_1(abs, "abs", f16)
BOTH_1(ex2_approx, "ex2.approx", f16)
BOTH_1(tanh_approx, "tanh.approx", f16)

BOTH_3(fma_rn, "fma.rn", bf16)
BOTH_3(fma_rn_relu, "fma.rn.relu", bf16)
BOTH_2(min, "min", bf16)
BOTH_2(max, "max", bf16)
BOTH_2(min_NaN, "min.NaN", bf16)
BOTH_2(max_NaN, "max.NaN", bf16)
BOTH_1(neg, "neg", bf16)
BOTH_1(abs, "abs", bf16)
