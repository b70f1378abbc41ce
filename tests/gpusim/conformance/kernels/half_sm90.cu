// bf16 arithmetic, as sm_90 adds to it.
#include "form.cuh"

#define BOTH_1(name, text)                   \
  UNARY(name##_bf16, text ".bf16", b16, b16) \
  UNARY(name##_bf16x2, text ".bf16x2", b32, b32)
#define BOTH_2(name, text)                         \
  BINARY(name##_bf16, text ".bf16", b16, b16, b16) \
  BINARY(name##_bf16x2, text ".bf16x2", b32, b32, b32)

BOTH_2(add_rn, "add.rn")
BOTH_2(sub_rn, "sub.rn")
BOTH_2(mul_rn, "mul.rn")
BOTH_1(ex2_approx_ftz, "ex2.approx.ftz")
BOTH_1(tanh_approx, "tanh.approx")
