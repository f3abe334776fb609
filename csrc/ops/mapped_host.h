// SPDX-License-Identifier: Apache-2.0
// Device addresses of pinned host memory. On most systems, they equal the host addresses. On some
// systems (WSL, sgl-project/sglang#40232), each pinned range is mapped to a different device
// address.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/block_copy.h"
#include "ops/device.h"
#include "ops/pinned_ranges.h"

namespace kvcache {

// Queries the driver. See shift_to_device.
inline std::optional<int64_t> ask_shift_to_device(const char* host) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, host);
  if (error != cudaSuccess || attributes.type != cudaMemoryTypeHost ||
      attributes.devicePointer == nullptr) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  return static_cast<const char*>(attributes.devicePointer) - host;
}

// Returns the device address minus the host address of pinned memory, or nullopt if the memory is
// not pinned. `device` must be current.
inline std::optional<int64_t> shift_to_device(int32_t device, const char* host) {
  return PinnedRanges::instance().shift(device, host, ask_shift_to_device);
}

// Throws an error, because kernels cannot access memory that is not pinned.
[[noreturn]] inline void fail_pageable(const std::string& name) {
  fail(name +
       " is host memory that is not pinned: expected pinned memory for engine 0 (kernel), or "
       "engine 1 (copy engine)");
}

// Splits `c` into parts whose host side (source or destination) is expressed by device addresses,
// and calls copy(part) for each.
template <class Copy>
void with_mapped_host(const BlockCopy& c, bool is_source, int32_t device, Copy&& copy) {
  const std::string name = is_source ? "src" : "dst";
  const char* base = is_source ? c.source : c.destination;
  const auto shifted = [&](int64_t shift) {
    BlockCopy part = c;
    if (is_source) {
      part.source += shift;
    } else {
      part.destination += shift;
    }
    return part;
  };
  const std::optional<int64_t> of_base = shift_to_device(device, base);
  if (!of_base) fail_pageable(name);
  const int64_t shift = *of_base;
  const auto offset = [&](const CopyRegion& r, int64_t page) {
    return is_source ? r.source + page * r.source_stride
                     : r.destination + page * r.destination_stride;
  };
  // Each region may be in separate memory (`Pages.over`). Regions that are not pinned are rejected,
  // because a kernel that accesses them would break the process's CUDA context.
  bool is_one_range = true;
  for (int64_t i = 0; i < (c.is_located ? 0 : c.num_regions); ++i) {
    const std::optional<int64_t> of_region =
        shift_to_device(device, base + offset(c.regions[i], 0));
    if (of_region == shift) continue;
    const std::string region = "regions[" + std::to_string(i) + "]";
    if (!of_region) fail_pageable(name + "'s " + region);
    is_one_range = false;
    if (c.pages_per_run > 0) continue;
    fail(name + " has " + region +
         " outside the pinned range of its first byte: expected a single pinned range, because "
         "this device maps each range to a different address, or engine 1 (copy engine)");
  }
  if (c.pages_per_run == 0 || (shift == 0 && is_one_range)) return copy(shifted(shift));
  if (!c.pairs_on_cpu) {
    fail(
        "pairs is on a device: expected cpu, because this device maps each pinned range of host "
        "memory to a different address");
  }
  std::map<int64_t, std::vector<int32_t>> pairs_of_range;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t page = c.pairs[2 * i + (is_source ? 0 : 1)];
    std::vector<int32_t>& pairs = pairs_of_range[page < 0 ? 0 : page / c.pages_per_run];
    pairs.insert(pairs.end(), {c.pairs[2 * i], c.pairs[2 * i + 1]});
  }
  for (const auto& [range, pairs] : pairs_of_range) {
    const char* first = base + offset(c.regions[0], range * c.pages_per_run);
    const std::optional<int64_t> of_range = shift_to_device(device, first);
    if (!of_range) fail_pageable(name);
    BlockCopy part = shifted(*of_range);
    part.pairs = pairs.data();
    part.num_pairs = static_cast<int64_t>(pairs.size() / 2);
    copy(part);
  }
}

}  // namespace kvcache
