// SPDX-License-Identifier: Apache-2.0
// Ids for a kernel, which are in device memory or are passed by the host in the launch parameters.
//
// A launch copies its parameters. Therefore, no buffer must outlive the call, no copy must complete
// first, and a captured graph keeps the ids with which it was captured. Because the size of the
// parameters is limited, a call with many ids needs several launches.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/device.h"
#include "ops/switches.h"
#include "worker/host_device.h"

#ifdef __CUDACC__
// Keeps a struct in parameter memory even if it is indexed at run time.
#define KV_PARAMETER __grid_constant__ const
#else
#define KV_PARAMETER const
#endif

namespace kvcache {

// Every driver accepts kSmallParameterBytes. From CUDA 12.1 and its driver (R530) on, the limit is
// 32,764 bytes on sm_70 and newer.
constexpr size_t kSmallParameterBytes = 4096;
#if defined(__CUDACC__) && CUDART_VERSION < 12010
constexpr size_t kLargeParameterBytes = kSmallParameterBytes;
#else
constexpr size_t kLargeParameterBytes = 32760;
#endif

// Returns whether the driver accepts the larger size. KVCACHE_SMALL_PARAMETERS=1 disables its use.
inline bool takes_large_parameters() {
#ifdef __CUDACC__
  static const bool by_driver = [] {
    int version = 0;
    KV_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12010;
  }();
#else
  constexpr bool by_driver = true;
#endif
  return by_driver && !switched_on("KVCACHE_SMALL_PARAMETERS");
}

// Returns whether the ids are on the host. Under emulation, all ids are on the host; with
// KVCACHE_EMUL_DEVICE_IDS=1, they are treated as device ids.
inline bool ids_on_host(const Tensor& ids) {
#ifdef __CUDACC__
  return ids.is_cpu();
#else
  return !switched_on("KVCACHE_EMUL_DEVICE_IDS") && ids.is_cpu();
#endif
}

// At most `kCapacity` ids for one launch.
template <int kCapacity>
struct LaunchIds {
  const int32_t* on_device;  // ids on the device; nullptr: the ids are in `values`
  int32_t values[kCapacity];

  KV_HOST_DEVICE int32_t operator[](int64_t i) const {
    return on_device != nullptr ? on_device[i] : values[i];
  }
};

// Returns the int32 ids [first, first + n) for one launch. `is_cpu` states whether the tensor of
// ids is on the CPU.
template <int kCapacity>
LaunchIds<kCapacity> launch_ids(const int32_t* ids, bool is_cpu, int64_t first, int64_t n) {
  LaunchIds<kCapacity> taken{};
  if (is_cpu) {
    std::copy_n(ids + first, n, taken.values);
  } else {
    taken.on_device = ids + first;
  }
  return taken;
}

}  // namespace kvcache
