#include "kernels/attention_bwd_plan.h"

namespace mha_ext {

WorkspaceBytes attention_bwd_sm80_workspace(const AttentionBackwardParams& p) {
  const AttentionBwdWorkspace workspace(p.forward);
  return {workspace.total, workspace.sums};
}

int64_t attention_bwd_sm80_slope_partials(const AttentionParams& p) {
  return std::max<int64_t>(ceil_div(p.seqlen_kv, attention_bwd_tile(p).block_n), 1);
}

}  // namespace mha_ext
