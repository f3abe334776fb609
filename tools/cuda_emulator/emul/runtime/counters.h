// SPDX-License-Identifier: Apache-2.0
// Counts of runtime calls by kind. Tests use them to assert the cost of a code path, because they
// reveal performance faults that, on a device, would only be visible as time.
#pragma once

#include <cstddef>

namespace kvcache::gpuless {

enum class Counter {
  kCopies,          // single copies
  kBatches,         // calls of cudaMemcpyBatchAsync
  kBatchedCopies,   // number of copies in batches
  kPageableCopies,  // single or batched copies with pageable host memory on one side
  kFills,
  kLaunches,        // launches of this project's kernels
  kLegacyWork,      // copies, fills, launches, host functions and operators on the legacy stream
  kWaits,           // waits of the host for a stream, an event, the device or a pageable copy
  kEventQueries,    // queries of events and streams
  kPointerQueries,  // queries of the kind of memory at an address
  kDeviceQueries,   // queries of device and kernel attributes, and of free memory
  kCaptureQueries,  // queries of a stream's capture status
  kAllocations,     // device allocations, pinned allocations and registrations
  kNum,
};

void count(Counter counter, long n = 1);
long count_of(Counter counter);
// Returns the counter's name in tests, or nullptr for a number above the last counter.
const char* name_of_counter(size_t i);

}  // namespace kvcache::gpuless
