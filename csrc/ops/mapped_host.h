// Pinned host memory by the addresses that a device has for it. They are the host's own on most
// systems; where they are not (WSL, sgl-project/sglang#40232), each pinned piece has its own.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ops/block_copy.h"
#include "ops/device.h"

namespace kvcache {

// What to add to a host address for the device's. An error that names the argument for memory that
// is not pinned: a kernel cannot reach it.
inline int64_t shift_to_device(const char* host, const char* name) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, host);
  if (error != cudaSuccess || attributes.type != cudaMemoryTypeHost ||
      attributes.devicePointer == nullptr) {
    (void)cudaGetLastError();
    fail(std::string(name) +
         " is host memory that is not pinned: expected pinned memory for engine 0 "
         "(kernel), or engine 1 (copy engine)");
  }
  return static_cast<const char*>(attributes.devicePointer) - host;
}

// Calls copy(part) with parts of `c` whose host side, source or destination, has the device's
// addresses.
template <class Copy>
void with_mapped_host(const BlockCopy& c, bool is_source, Copy&& copy) {
  const char* name = is_source ? "src" : "dst";
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
  const int64_t shift = shift_to_device(base, name);
  if (shift == 0) return copy(c);
  const auto offset = [&](const CopyRegion& r, int64_t page) {
    return is_source ? r.source + page * r.source_stride
                     : r.destination + page * r.destination_stride;
  };
  if (c.pages_per_run == 0) {
    for (int64_t i = 0; i < c.num_regions; ++i) {
      if (shift_to_device(base + offset(c.regions[i], 0), name) == shift) continue;
      fail(std::string(name) + " has regions[" + std::to_string(i) +
           "] in other pinned memory than its first byte: expected one piece on this device, which "
           "has addresses of its own for each, or engine 1 (copy engine)");
    }
    return copy(shifted(shift));
  }
  if (!c.pairs_on_cpu) {
    fail(
        "pairs is on a device: expected cpu, as this device has addresses of its own for each "
        "pinned piece of host memory");
  }
  std::map<int64_t, std::vector<int32_t>> pairs_of_piece;
  for (int64_t i = 0; i < c.num_pairs; ++i) {
    const int32_t page = c.pairs[2 * i + (is_source ? 0 : 1)];
    std::vector<int32_t>& pairs = pairs_of_piece[page < 0 ? 0 : page / c.pages_per_run];
    pairs.insert(pairs.end(), {c.pairs[2 * i], c.pairs[2 * i + 1]});
  }
  for (const auto& [piece, pairs] : pairs_of_piece) {
    const char* first = base + offset(c.regions[0], piece * c.pages_per_run);
    BlockCopy part = shifted(shift_to_device(first, name));
    part.pairs = pairs.data();
    part.num_pairs = static_cast<int64_t>(pairs.size() / 2);
    copy(part);
  }
}

}  // namespace kvcache
