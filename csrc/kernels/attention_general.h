// Which calls the plain instance of a 16-bit kernel does not take.
#pragma once

#include "attention/mask.h"

namespace mha_ext {

inline bool has_general_scores(const AttentionParams& p) {
  return changes_scores(p.rule) || p.rule.attn_mask || p.dropout.rng_state;
}

// Plain scores stay raw in the forward, and the largest of them is the largest score where scale > 0.
inline bool has_general_forward(const AttentionParams& p) {
  return has_general_scores(p) || p.max_score || p.entropy || !(p.scale > 0);
}

}  // namespace mha_ext
