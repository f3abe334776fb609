// SPDX-License-Identifier: Apache-2.0
// A version of torch's parallel_for that also works in forked processes.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <cstdint>

namespace kvcache {

// A forked process inherits torch's thread pool but not the pool's threads, so waiting for these
// threads would hang. Therefore, in forked processes, the calling thread does all the work.
template <typename Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
  static const pid_t first_user = getpid();
  if (getpid() == first_user) {
    torch::stable::parallel_for(begin, end, grain, function);
  } else if (begin < end) {
    function(begin, end);
  }
}

}  // namespace kvcache
