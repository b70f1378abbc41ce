// The forward of bf16 for AVX-512 F, BW, VL, DQ and BF16; everything else is that of AVX-512.
#include "cpu/kernel/includes.h"

#if defined(__x86_64__)
#define MHA_CPU_TARGET avx512_bf16
#define MHA_CPU_VECTOR_BYTES 64
#define MHA_CPU_BF16_PAIRS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#endif
#include "cpu/kernel/attention.h"

namespace mha_ext::cpu::avx512_bf16 {
namespace {

void run_unit(const AttentionParams& params, const WorkPlan& plan, int64_t unit) {
  if (params.dtype != DType::kBFloat16) return avx512::kKernels.run_unit(params, plan, unit);
  attend<BFloat16>(params, plan, unit);
}

int64_t packed_values_size_of(const AttentionParams& params) {
  return params.dtype == DType::kBFloat16 ? packed_values_size(params) : 0;
}

void merge_splits(const AttentionParams& params, const WorkPlan& plan, int64_t tile) {
  avx512::kKernels.merge_splits(params, plan, tile);
}

void run_backward_item(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t item, float* own) {
  avx512::kKernels.run_backward_item(params, plan, item, own);
}

void add_query_parts(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t tile) {
  avx512::kKernels.add_query_parts(params, plan, tile);
}

}  // namespace

const Kernels kKernels = {"avx512_bf16",          &run_unit,   &merge_splits, &run_backward_item, &add_query_parts,
                          &packed_values_size_of, &pack_values};

}  // namespace mha_ext::cpu::avx512_bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
