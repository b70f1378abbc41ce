// What a target offers: its kernels for every type, and their table.
#pragma once

#include "cpu/kernel/attention.h"

namespace mha_ext::cpu::MHA_CPU_TARGET {
namespace {

void run_unit(const AttentionParams& params, const WorkPlan& plan, int64_t unit) {
  with_element_type(params.dtype, [&](auto element) { attend<decltype(element)>(params, plan, unit); });
}

void merge_splits(const AttentionParams& params, const WorkPlan& plan, int64_t tile_index) {
  const Tile tile = tile_at(params, plan, tile_index);
  TileState state = start_tile(params, tile);
  with_element_type(params.dtype, [&](auto element) { merge_tile<decltype(element)>(state, plan, tile_index); });
}

#define MHA_NAME_OF(target) #target
#define MHA_STRING_OF(target) MHA_NAME_OF(target)

}  // namespace

// In a file of their own for each target, kernel/backward.h.
void run_backward_item(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t item, float* own);
void add_query_parts(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t tile);

const Kernels kKernels = {MHA_STRING_OF(MHA_CPU_TARGET), &run_unit, &merge_splits, &run_backward_item,
                          &add_query_parts};

}  // namespace mha_ext::cpu::MHA_CPU_TARGET
