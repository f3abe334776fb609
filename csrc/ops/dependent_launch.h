// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): a kernel launched with KV_LAUNCH_DEPENDENT may start while
// the stream's previous kernel is still running, which hides the launch latency of small kernels.
// Requires sm_90 and a driver for CUDA 12.3; otherwise, the kernel starts after the previous one.
#pragma once

#include <cstddef>
#include <vector>

#include "ops/device.h"

#if defined(__CUDACC__) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
#define KV_HAS_DEPENDENT_LAUNCHES
#endif

namespace kvcache {

// Must be called by every thread of a kernel that is launched with KV_LAUNCH_DEPENDENT, before the
// thread accesses global memory.
//
// Waits until the previous kernel has completed and its writes are visible. Only then may the next
// kernel start, which waits for this kernel in the same way. Therefore, a kernel starts only after
// all kernels before the previous kernel have completed. Both instructions have no effect if the
// kernels were launched without the attribute.
__device__ __forceinline__ void begin_after_previous_kernel() {
#ifdef KV_HAS_DEPENDENT_LAUNCHES
  asm volatile(
      "griddepcontrol.wait;\n\t"
      "griddepcontrol.launch_dependents;" ::
          : "memory");
#endif
}

#ifdef __CUDACC__
// Whether this library has code for sm_90 or later. Code that the driver compiles from the PTX of
// an older architecture does not wait for the previous kernel.
constexpr bool has_waiting_code() {
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  for (const int arch : kArchs) {
    if (arch >= 900) return true;
  }
  return false;
}

// Returns whether the code, the device and the driver support dependent launches. A graph can
// capture them from CUDA 12.3 on. The driver is asked once.
inline bool launches_dependent(const OnDevice& device) {
  if constexpr (!has_waiting_code()) return false;
  static const std::vector<bool> supported = [] {  // indexed by device
    int version = 0, num_devices = 0;
    KV_CUDA_CHECK(cudaDriverGetVersion(&version));
    KV_CUDA_CHECK(cudaGetDeviceCount(&num_devices));
    std::vector<bool> found;
    for (int i = 0; i < num_devices; ++i) {
      int capability = 0;
      KV_CUDA_CHECK(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, i));
      found.push_back(version >= 12030 && capability >= 9);
    }
    return found;
  }();
  return supported[static_cast<size_t>(device.index)];
}

inline cudaLaunchAttribute dependent_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

#define KV_LAUNCH_DEPENDENT(kernel, grid, block, device, ...)                         \
  do {                                                                                \
    if (::kvcache::launches_dependent(device)) {                                      \
      ::kvcache::launch_with(::kvcache::dependent_launch(), (kernel), grid, block, 0, \
                             (device).stream, __VA_ARGS__);                           \
    } else {                                                                          \
      KV_LAUNCH(kernel, grid, block, 0, (device).stream, __VA_ARGS__);                \
    }                                                                                 \
  } while (0)
#elif defined(KVCACHE_GPULESS)
#define KV_LAUNCH_DEPENDENT(kernel, grid, block, device, ...) \
  KV_LAUNCH(kernel, grid, block, 0, (device).stream, __VA_ARGS__)
#else
#define KV_LAUNCH_DEPENDENT(kernel, grid, block, device, ...) \
  emul::launch_kernel<(kernel), true>(grid, block, 0, 1, __VA_ARGS__)
#endif

}  // namespace kvcache
