// SPDX-License-Identifier: Apache-2.0
// Kernel launches, and dynamic shared memory.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "emul/scheduler.h"
#include "emul/shared_limits.h"
#include "emul/types.h"

// Under nvcc, the project defines this macro as `extern __shared__ T name[]`.
#define KV_DYN_SHARED(T, name) T* name = ::emul::dynamic_shared<T>()

namespace emul {

// Checks a launch against CUDA's limits for compute capability 9.0 (227 KiB of shared memory).
inline void check_launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes) {
  const auto require = [](bool ok, const char* what, const std::string& got) {
    if (!ok) throw std::invalid_argument(std::string("emul::launch: ") + what + ", got " + got);
  };
  const std::string grid_text = to_string({grid.x, grid.y, grid.z});
  const std::string block_text = to_string({block.x, block.y, block.z});
  require(grid.x > 0 && grid.y > 0 && grid.z > 0, "grid must not be empty", grid_text);
  require(grid.x <= 0x7fffffffu, "grid.x must be below 2^31", grid_text);
  require(grid.y <= 65535 && grid.z <= 65535, "grid.y and z must be at most 65535", grid_text);
  require(block.x > 0 && block.y > 0 && block.z > 0, "block must not be empty", block_text);
  require(block.x <= 1024 && block.y <= 1024 && block.z <= 64,
          "block must be at most 1024 x 1024 x 64", block_text);
  require(block.x * block.y * block.z <= 1024, "block must have at most 1024 threads", block_text);
  require(dynamic_shared_bytes <= kMaxSharedBytes, "dynamic shared memory must be at most 227 KiB",
          std::to_string(dynamic_shared_bytes) + " bytes");
}

// Checks a launch with clusters of `cluster` blocks along x against CUDA's limits and against a
// limit of this emulator.
inline void check_clusters(dim3 grid, dim3 block, unsigned cluster) {
  if (cluster < 1 || cluster > 8 || grid.x % cluster != 0) {
    throw std::invalid_argument(
        "emul::launch: clusters of " + std::to_string(cluster) +
        " blocks: expected 1 to 8 blocks, and a divisor of grid.x, which is " +
        std::to_string(grid.x));
  }
  if (cluster > 1 && block.x * block.y * block.z % kWarpLanes != 0) {
    throw std::invalid_argument("emul::launch: clusters of blocks that have a partial warp");
  }
}

// Runs kernel_call once per thread in the grid, and returns when all threads have finished. Throws
// std::invalid_argument for dimensions that CUDA would reject, std::logic_error for a barrier that
// cannot complete (with the number of waiting threads per source line), and any exception that a
// thread throws. After such an error, the emulator is ready for the next launch. OS threads may
// launch concurrently.
template <class F>
void launch_clusters(dim3 grid, dim3 block, size_t dynamic_shared_bytes, unsigned cluster,
                     F&& kernel_call) {
  check_launch(grid, block, dynamic_shared_bytes);
  check_clusters(grid, block, cluster);
  auto once = [&kernel_call] { kernel_call(); };  // an object, even if F is a function type
  const auto call = [](void* argument) { (*static_cast<decltype(once)*>(argument))(); };
  emulator().run_grid(grid, block, dynamic_shared_bytes, cluster, call, &once);
}

template <class F>
void launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, F&& kernel_call) {
  launch_clusters(grid, block, dynamic_shared_bytes, 1, kernel_call);
}

// A launch, as passed to a function that runs it in place of the emulator.
struct Launch {
  const char* kernel;  // mangled name of the type Named<kernel>
  unsigned grid[3], block[3], cluster;
  bool is_dependent;  // may start before the stream's previous kernel has ended
  size_t dynamic_shared_bytes, parameter_bytes;
  const void* parameters;  // in the layout of CUDA's parameter memory
};
using LaunchHook = void (*)(const Launch*);
inline LaunchHook& launch_hook() {
  static LaunchHook hook = nullptr;
  return hook;
}
template <auto kKernel>
struct Named {};

template <class T>
void append_parameter(std::vector<char>& parameters, const T& value) {
  parameters.resize((parameters.size() + alignof(T) - 1) / alignof(T) * alignof(T));
  const char* bytes = reinterpret_cast<const char*>(&value);
  parameters.insert(parameters.end(), bytes, bytes + sizeof(T));
}

template <auto kKernel, bool kDependent, class... P>
void launch_with(void (*)(P...), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
                 unsigned cluster, const std::common_type_t<P>&... arguments) {
  SharedLimits::instance().check(reinterpret_cast<const void*>(kKernel), dynamic_shared_bytes);
  if (launch_hook() == nullptr) {
    launch_clusters(grid, block, dynamic_shared_bytes, cluster, [&] { kKernel(arguments...); });
    return;
  }
  std::vector<char> parameters;
  (append_parameter(parameters, arguments), ...);
  const Launch launch{typeid(Named<kKernel>).name(),
                      {grid.x, grid.y, grid.z},
                      {block.x, block.y, block.z},
                      cluster,
                      kDependent,
                      dynamic_shared_bytes,
                      parameters.size(),
                      parameters.data()};
  launch_hook()(&launch);
}

// Launches a kernel, after checking its shared memory against SharedLimits.
template <auto kKernel, bool kDependent = false, class... A>
void launch_kernel(dim3 grid, dim3 block, size_t dynamic_shared_bytes, unsigned cluster,
                   const A&... arguments) {
  launch_with<kKernel, kDependent>(kKernel, grid, block, dynamic_shared_bytes, cluster,
                                   arguments...);
}

template <class T>
T* dynamic_shared() {
  static_assert(alignof(T) <= 16, "dynamic shared memory is aligned to 16 bytes");
  return reinterpret_cast<T*>(emulator().dynamic_shared());
}

}  // namespace emul
