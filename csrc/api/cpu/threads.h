// Work shared out among torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace mha_ext {

constexpr double kFlopsOfTwoThreads = 0.25e6;  // below it, waking a thread takes longer than it saves

inline int threads_for(double flops) {
  return flops < kFlopsOfTwoThreads || at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Calls run(index, slot) for every index, in order, each by the next of `threads` that is free. No two calls at the
// same time have the same slot.
template <typename Run>
void share_out(int64_t count, int threads, const Run& run) {
  if (threads == 1 || count == 1) {
    for (int64_t index = 0; index < count; ++index) run(index, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(threads, count), 1, [&](int64_t slot, int64_t) {
    for (int64_t index = next++; index < count; index = next++) run(index, slot);
  });
}

}  // namespace mha_ext
