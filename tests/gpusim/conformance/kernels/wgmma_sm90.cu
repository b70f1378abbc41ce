// wgmma: one instruction, m64nNk16 or k8. The operands' bytes come as an image of shared memory, the descriptors
// without their address; accumulators [thread][register] come and go through global memory. Everything from the first
// load to the last store is one piece of PTX, so that no register of the accumulators is seen by the compiler.
#include "async_sm90.cuh"

// Registers of the accumulators in groups of four, d<group>_0 to d<group>_3; GROUPS_N(F, G) is F(0) G(1) G(2) ...
#define GROUPS_1(F, G) F(0)
#define GROUPS_2(F, G) GROUPS_1(F, G) G(1)
#define GROUPS_3(F, G) GROUPS_2(F, G) G(2)
#define GROUPS_4(F, G) GROUPS_3(F, G) G(3)
#define GROUPS_5(F, G) GROUPS_4(F, G) G(4)
#define GROUPS_6(F, G) GROUPS_5(F, G) G(5)
#define GROUPS_7(F, G) GROUPS_6(F, G) G(6)
#define GROUPS_8(F, G) GROUPS_7(F, G) G(7)
#define GROUPS_9(F, G) GROUPS_8(F, G) G(8)
#define GROUPS_10(F, G) GROUPS_9(F, G) G(9)
#define GROUPS_11(F, G) GROUPS_10(F, G) G(10)
#define GROUPS_12(F, G) GROUPS_11(F, G) G(11)
#define GROUPS_13(F, G) GROUPS_12(F, G) G(12)
#define GROUPS_14(F, G) GROUPS_13(F, G) G(13)
#define GROUPS_15(F, G) GROUPS_14(F, G) G(14)
#define GROUPS_16(F, G) GROUPS_15(F, G) G(15)
#define GROUPS_17(F, G) GROUPS_16(F, G) G(16)
#define GROUPS_18(F, G) GROUPS_17(F, G) G(17)
#define GROUPS_19(F, G) GROUPS_18(F, G) G(18)
#define GROUPS_20(F, G) GROUPS_19(F, G) G(19)
#define GROUPS_21(F, G) GROUPS_20(F, G) G(20)
#define GROUPS_22(F, G) GROUPS_21(F, G) G(21)
#define GROUPS_23(F, G) GROUPS_22(F, G) G(22)
#define GROUPS_24(F, G) GROUPS_23(F, G) G(23)
#define GROUPS_25(F, G) GROUPS_24(F, G) G(24)
#define GROUPS_26(F, G) GROUPS_25(F, G) G(25)
#define GROUPS_27(F, G) GROUPS_26(F, G) G(26)
#define GROUPS_28(F, G) GROUPS_27(F, G) G(27)
#define GROUPS_29(F, G) GROUPS_28(F, G) G(28)
#define GROUPS_30(F, G) GROUPS_29(F, G) G(29)
#define GROUPS_31(F, G) GROUPS_30(F, G) G(30)
#define GROUPS_32(F, G) GROUPS_31(F, G) G(31)

#define NAME(i) "d" #i "_0, d" #i "_1, d" #i "_2, d" #i "_3"
#define COMMA_NAME(i) ", " NAME(i)
#define DECLARE_F32(i) ".reg .f32 " NAME(i) ";\n"
#define DECLARE_B32(i) ".reg .b32 " NAME(i) ";\n"
#define LOAD_F32(i) "ld.global.v4.f32 {" NAME(i) "}, [p];\nadd.u64 p, p, 16;\n"
#define LOAD_B32(i) "ld.global.v4.b32 {" NAME(i) "}, [p];\nadd.u64 p, p, 16;\n"
#define STORE_F32(i) "st.global.v4.f32 [p], {" NAME(i) "};\nadd.u64 p, p, 16;\n"
#define STORE_B32(i) "st.global.v4.b32 [p], {" NAME(i) "};\nadd.u64 p, p, 16;\n"

// The image to shared memory; the address, as descriptors have it, is added to them.
__device__ void place_operands(const uint4* image, b32 bytes, b64& a, b64& b) {
  uint8_t* base = aligned_shared();
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) reinterpret_cast<uint4*>(base)[i] = image[i];
  to_async_proxy();
  __syncthreads();
  const b64 address = (shared_address(base) & 0x3FFFF) >> 4;
  a += address;
  b += address;
}

// TYPE: F32 or B32, of the accumulators' registers; `groups` of four of them a thread; `text` from the shape on;
// `a` the operand in the text; `flags`: scales and major-ness.
#define WGMMA(TYPE, groups, text, a, flags, ...) \
  asm volatile("{\n.reg .pred s;\n.reg .b64 p;\n" GROUPS_##groups(DECLARE_##TYPE, DECLARE_##TYPE)                    \
               "setp.ne.u32 s, %2, 0;\nmov.b64 p, %0;\n" GROUPS_##groups(LOAD_##TYPE, LOAD_##TYPE)                   \
               "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned." text " {" GROUPS_##groups(NAME, COMMA_NAME) \
               "}, " a ", %1, s, " flags ";\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"   \
               "mov.b64 p, %0;\n" GROUPS_##groups(STORE_##TYPE, STORE_##TYPE) "}" ::"l"(mine),                       \
               "l"(b), "r"(scale_d), __VA_ARGS__                                                                     \
               : "memory")

// A from shared memory
#define SHARED(name, TYPE, groups, text, flags)                                                           \
  extern "C" __global__ void __launch_bounds__(128)                                                       \
      name(const uint4* image, b32 bytes, b64 a, b64 b, const uint4*, uint4* accumulators, b32 scale_d) { \
    place_operands(image, bytes, a, b);                                                                   \
    uint4* mine = accumulators + threadIdx.x * groups;                                                    \
    WGMMA(TYPE, groups, text, "%3", flags, "l"(a));                                                       \
  }
// A from registers, four a thread
#define REGISTERS(name, TYPE, groups, text, flags)                                                                 \
  extern "C" __global__ void __launch_bounds__(128)                                                                \
      name(const uint4* image, b32 bytes, b64 a, b64 b, const uint4* fragment, uint4* accumulators, b32 scale_d) { \
    place_operands(image, bytes, a, b);                                                                            \
    uint4* mine = accumulators + threadIdx.x * groups;                                                             \
    const uint4 r = fragment[threadIdx.x];                                                                         \
    WGMMA(TYPE, groups, text, "{%3, %4, %5, %6}", flags, "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w));                  \
  }

// Every N; then the other forms at a few N. In flags: scale of A, of B, A MN-major, B MN-major.
#define EVERY_N(n, groups) SHARED(ss_n##n##_f32_f16, F32, groups, "m64n" #n "k16.f32.f16.f16", "1, 1, 0, 0")
EVERY_N(8, 1)
EVERY_N(16, 2)
EVERY_N(24, 3)
EVERY_N(32, 4)
EVERY_N(40, 5)
EVERY_N(48, 6)
EVERY_N(56, 7)
EVERY_N(64, 8)
EVERY_N(72, 9)
EVERY_N(80, 10)
EVERY_N(88, 11)
EVERY_N(96, 12)
EVERY_N(104, 13)
EVERY_N(112, 14)
EVERY_N(120, 15)
EVERY_N(128, 16)
EVERY_N(136, 17)
EVERY_N(144, 18)
EVERY_N(152, 19)
EVERY_N(160, 20)
EVERY_N(168, 21)
EVERY_N(176, 22)
EVERY_N(184, 23)
EVERY_N(192, 24)
EVERY_N(200, 25)
EVERY_N(208, 26)
EVERY_N(216, 27)
EVERY_N(224, 28)
EVERY_N(232, 29)
EVERY_N(240, 30)
EVERY_N(248, 31)
EVERY_N(256, 32)

#define HALF(type, n, groups)                                                                           \
  SHARED(ss_n##n##_f32_##type##_mn_k, F32, groups, "m64n" #n "k16.f32." #type "." #type, "1, 1, 1, 0")  \
  SHARED(ss_n##n##_f32_##type##_k_mn, F32, groups, "m64n" #n "k16.f32." #type "." #type, "1, 1, 0, 1")  \
  SHARED(ss_n##n##_f32_##type##_mn_mn, F32, groups, "m64n" #n "k16.f32." #type "." #type, "1, 1, 1, 1") \
  REGISTERS(rs_n##n##_f32_##type, F32, groups, "m64n" #n "k16.f32." #type "." #type, "1, 1, 0")         \
  REGISTERS(rs_n##n##_f32_##type##_mn, F32, groups, "m64n" #n "k16.f32." #type "." #type, "1, 1, 1")
#define BF16(n, groups) SHARED(ss_n##n##_f32_bf16, F32, groups, "m64n" #n "k16.f32.bf16.bf16", "1, 1, 0, 0")
#define TF32(n, groups)                                                         \
  SHARED(ss_n##n##_f32_tf32, F32, groups, "m64n" #n "k8.f32.tf32.tf32", "1, 1") \
  REGISTERS(rs_n##n##_f32_tf32, F32, groups, "m64n" #n "k8.f32.tf32.tf32", "1, 1")
HALF(f16, 64, 8)
HALF(f16, 128, 16)
HALF(f16, 256, 32)
HALF(bf16, 64, 8)
HALF(bf16, 128, 16)
HALF(bf16, 256, 32)
BF16(8, 1)
BF16(64, 8)
BF16(96, 12)
BF16(128, 16)
BF16(256, 32)
TF32(8, 1)
TF32(64, 8)
TF32(128, 16)
TF32(256, 32)
REGISTERS(rs_n8_f32_f16, F32, 1, "m64n8k16.f32.f16.f16", "1, 1, 0")
REGISTERS(rs_n8_f32_bf16, F32, 1, "m64n8k16.f32.bf16.bf16", "1, 1, 0")

// fp16 accumulators, two a register; and negated operands
SHARED(ss_n16_f16_f16, B32, 1, "m64n16k16.f16.f16.f16", "1, 1, 0, 0")
SHARED(ss_n64_f16_f16, B32, 4, "m64n64k16.f16.f16.f16", "1, 1, 0, 0")
SHARED(ss_n256_f16_f16, B32, 16, "m64n256k16.f16.f16.f16", "1, 1, 0, 0")
SHARED(ss_n64_f32_f16_negated_a, F32, 8, "m64n64k16.f32.f16.f16", "-1, 1, 0, 0")
SHARED(ss_n64_f32_f16_negated_b, F32, 8, "m64n64k16.f32.f16.f16", "1, -1, 0, 0")
