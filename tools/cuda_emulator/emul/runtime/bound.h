// SPDX-License-Identifier: Apache-2.0
// A kernel that the emulator can run. The library of emulated kernels passes it to the runtime.
#pragma once

#include <cstddef>
#include <functional>

namespace kvcache::gpuless {

struct LaunchShape {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  unsigned cluster;  // thread blocks per cluster along x
};

struct Bound {
  const char* type_name;  // mangled name of the type Named<kernel>
  // Copies the parameters, and returns a function that runs the kernel and may be called
  // repeatedly.
  std::function<void()> (*bind)(void** arguments, const LaunchShape& shape);
};

}  // namespace kvcache::gpuless
