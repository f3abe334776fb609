// SPDX-License-Identifier: Apache-2.0
// Determines how many of a kernel's thread blocks can be resident on a device. If a grid has this
// size and its thread blocks loop over tasks, there is no half-empty last wave.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "ops/device.h"

namespace kvcache {

// Returns the number of resident thread blocks, at least 1, for `kKernel` with kThreads threads and
// without dynamic shared memory. The device is queried once per kernel.
template <auto kKernel, int kThreads>
int64_t resident_blocks(const OnDevice& device) {
  static std::array<std::atomic<int32_t>, 64> known{};  // indexed by device; 0: not queried yet
  const auto index = static_cast<size_t>(device.index);
  if (index < known.size()) {
    if (const int32_t blocks = known[index].load(std::memory_order_relaxed)) return blocks;
  }
  int per_multiprocessor = 0, multiprocessors = 0;
  KV_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kKernel, kThreads, 0));
  KV_CUDA_CHECK(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index));
  const int32_t blocks = per_multiprocessor * multiprocessors;
  if (blocks < 1) return 1;
  if (index < known.size()) known[index].store(blocks, std::memory_order_relaxed);
  return blocks;
}

}  // namespace kvcache
