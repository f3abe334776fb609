// A kernel that the emulator can run, as the library of emulated kernels hands it to the runtime.
#pragma once

#include <cstddef>
#include <functional>

namespace kvcache::gpuless {

struct LaunchShape {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  unsigned cluster;  // thread blocks of a cluster, along x
};

struct Bound {
  const char* type_name;  // mangled, of a type that holds the kernel: Named<kernel>
  // Copies the parameters; the result runs the kernel and may be called more than once.
  std::function<void()> (*bind)(void** arguments, const LaunchShape& shape);
};

}  // namespace kvcache::gpuless
