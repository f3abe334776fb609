// SPDX-License-Identifier: Apache-2.0
// The arguments of a block copy, as plain data.
#pragma once

#include <cstdint>

#include "worker/host_device.h"

namespace kvcache {

// A value of the op's argument pages_per_run: a single call pinned all pages, and an earlier copy
// with the same memory and regions has succeeded. The driver is not queried about each region.
constexpr int64_t kLocated = -1;
constexpr int32_t kCleared = -1;  // source id that fills the destination with zeros

// A region on both sides. This struct is a row in the op's table, which is passed to a kernel
// unchanged.
struct CopyRegion {
  // The offset of page 0 in the tensor, and the distance between pages, in bytes.
  int64_t source, source_stride;
  int64_t destination, destination_stride;
  int64_t num_bytes;  // bytes per page

  // Whether consecutive pages are contiguous on both sides.
  bool is_dense() const { return source_stride == num_bytes && destination_stride == num_bytes; }
};
constexpr int64_t kRegionFields = 5;
static_assert(sizeof(CopyRegion) == kRegionFields * sizeof(int64_t), "a row of the op's table");

// The engine that copies between a device and the host. kSingle is the copy engine with one call
// per fragment. kBatchOfSettled is kBatch for a source to which no work in flight writes, so that
// the source may be read immediately, before earlier work in the stream has run.
enum class CopyEngine : int64_t { kKernel = 0, kBatch = 1, kSingle = 2, kBatchOfSettled = 3 };

struct BlockCopy {
  const char* source;  // the destination if the call has no source
  char* destination;
  const CopyRegion* regions;  // on the CPU
  int64_t num_regions;
  const int32_t* pairs;  // [num_pairs, 2]: source (or kCleared), destination
  bool pairs_on_cpu;
  int64_t num_pairs;
  int64_t num_sources, num_destinations;  // pages
  CopyEngine engine;
  int64_t pages_per_run;      // number of pages in each pinned host range; 0: one range
  bool is_located;            // whether all regions are known to be in the range of the first byte
  int64_t num_thread_blocks;  // number of thread blocks; 0: chosen by direction
  bool within;                // whether both sides share pages

  const char* from(const CopyRegion& r, int64_t page) const {
    return source + r.source + page * r.source_stride;
  }
  char* to(const CopyRegion& r, int64_t page) const {
    return destination + r.destination + page * r.destination_stride;
  }
  int64_t page_bytes() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_regions; ++i) sum += regions[i].num_bytes;
    return sum;
  }
};

// Returns whether an id in a pair is out of range.
KV_HOST_DEVICE bool is_bad_pair(int32_t source, int32_t destination, int64_t num_sources,
                                int64_t num_destinations) {
  return source < kCleared || source >= num_sources || destination < 0 ||
         destination >= num_destinations;
}

}  // namespace kvcache
