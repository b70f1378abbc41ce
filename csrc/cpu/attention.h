// Attention on the CPU: the kernels of every target that this binary holds, and the one in force.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "params.h"

namespace mha_ext::cpu {

struct WorkPlan;
struct BackwardPlan;

// The same source, compiled for one instruction set.
struct Kernels {
  const char* target;
  // One unit of a plan: a tile of queries against all keys that it sees, or against one split of them.
  void (*run_unit)(const AttentionParams& params, const WorkPlan& plan, int64_t unit);
  // The splits of a tile, put together.
  void (*merge_splits)(const AttentionParams& params, const WorkPlan& plan, int64_t tile);
  // One item of a plan of the backward. own: plan.accumulator_floats of the thread's own, or null where that is 0.
  void (*run_backward_item)(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t item, float* own);
  // The gradient of a tile's queries, where plan.runs > 1, after all items.
  void (*add_query_parts)(const AttentionBackwardParams& params, const BackwardPlan& plan, int64_t tile);
  // How many floats values take where they are packed once for all tiles of a call; 0 where each tile reads them as
  // they lie. Null: always 0.
  int64_t (*packed_values_size)(const AttentionParams& params) = nullptr;
  // One head of plan.packed_values, of batch * num_heads_kv; before the units of the plan.
  void (*pack_values)(const AttentionParams& params, float* packed_values, int64_t head) = nullptr;
};

namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace portable {
extern const Kernels kKernels;
}

// What this machine can run, fastest first.
std::vector<std::string> targets();

// The kernels in force: of the target that use_target() named, else of MHA_EXT_CPU_TARGET, else the fastest.
// Throws std::invalid_argument where a name is not one of targets().
const Kernels& kernels();
void use_target(const std::string& name);  // empty: back to the default

}  // namespace mha_ext::cpu
