// Ids as a kernel takes them: from the device, or from the host as part of the launch's parameters.
//
// What travels as a parameter is copied by the launch itself: there is no buffer that somebody must
// keep until the kernel has run, no copy to wait for, and a captured graph keeps the ids it was
// captured with. Parameters are bounded: launches take so many ids at a time.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/device.h"
#include "ops/host_device.h"

#ifdef __CUDACC__
// A struct that stays in the parameters' memory where it is indexed at run time.
#define KV_PARAMETER __grid_constant__ const
#else
#define KV_PARAMETER const
#endif

namespace kvcache {

// Every driver takes kSmallParameterBytes. CUDA 12.1 compiles, and its driver (R530) launches, up
// to 32,764 bytes on sm_70 and newer.
constexpr size_t kSmallParameterBytes = 4096;
#if defined(__CUDACC__) && CUDART_VERSION < 12010
constexpr size_t kLargeParameterBytes = kSmallParameterBytes;
#else
constexpr size_t kLargeParameterBytes = 32760;
#endif

// Whether the driver does. KVCACHE_SMALL_PARAMETERS=1 says that it does not.
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

// Whether the ids came from the host. Emulated, all did: KVCACHE_EMUL_DEVICE_IDS=1 says otherwise.
inline bool ids_on_host(const Tensor& ids) {
#ifdef __CUDACC__
  return ids.is_cpu();
#else
  return !switched_on("KVCACHE_EMUL_DEVICE_IDS") && ids.is_cpu();
#endif
}

// `kCapacity` ids of one launch.
template <int kCapacity>
struct LaunchIds {
  const int32_t* on_device;  // nullptr: `values`
  int32_t values[kCapacity];

  KV_HOST_DEVICE int32_t operator[](int64_t i) const {
    return on_device != nullptr ? on_device[i] : values[i];
  }
};

// The part of int32 ids [first, first + n) that one launch takes; `is_cpu` as the ids' tensor says.
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
