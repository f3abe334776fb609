// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launches. Kernels run one after another, but it is checked that each
// thread waits for the previous kernel.
#pragma once

#include <stdexcept>

#include "emul/launch.h"
#include "emul/scheduler.h"
#include "emul/types.h"

namespace emul {

// Marks that the running thread has waited for the previous kernel.
inline void begin_after_previous_kernel() { emulator().current().is_after_previous_kernel = true; }

// Launches a kernel that may start while the previous kernel is still running. Throws
// std::logic_error if a thread ends without having waited for the previous kernel.
template <class Kernel, class F>
void launch_dependent_kernel(Kernel* kernel, dim3 grid, dim3 block, F&& kernel_call) {
  launch_kernel(kernel, grid, block, 0, [&kernel_call] {
    kernel_call();
    if (!emulator().current().is_after_previous_kernel) {
      throw std::logic_error("a thread of a dependent launch did not wait for the previous kernel");
    }
  });
}

}  // namespace emul
