// Ids as a kernel takes them: from the device, or from the host as part of the launch's parameters.
//
// What travels as a parameter is copied by the launch itself: there is no buffer that somebody must
// keep until the kernel has run, no copy to wait for, and a captured graph keeps the ids it was
// captured with. Parameters are bounded (4 KiB): launches take so many ids at a time.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/host_device.h"

#ifdef __CUDACC__
// A struct that stays in the parameters' memory where it is indexed at run time.
#define KV_PARAMETER __grid_constant__ const
#else
#define KV_PARAMETER const
#endif

namespace kvcache {

constexpr size_t kMaxParameterBytes = 4096;

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
