// SPDX-License-Identifier: Apache-2.0
// A kernel that the emulator can run, passed from the library of emulated kernels to the runtime.
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
  const char* type_name;  // mangled name of a type that holds the kernel: Named<kernel>
  // Copies the parameters. The result runs the kernel and may be called repeatedly.
  std::function<void()> (*bind)(void** arguments, const LaunchShape& shape);
};

}  // namespace kvcache::gpuless
