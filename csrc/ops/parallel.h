// SPDX-License-Identifier: Apache-2.0
// torch's parallel_for, also usable in forked processes.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <cstdint>

namespace kvcache {

// A forked process inherits torch's thread pool without its threads, so waiting for the threads
// would hang. In forked processes, the calling thread therefore does all the work.
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
