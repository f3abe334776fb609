// SPDX-License-Identifier: Apache-2.0
// Counts of runtime calls by kind. Tests compare counts to assert the cost of a path. The counts
// reveal performance faults that would only show as time on a device.
#pragma once

#include <cstddef>

namespace kvcache::gpuless {

enum class Counter {
  kCopies,          // single copies
  kBatches,         // calls of cudaMemcpyBatchAsync
  kBatchedCopies,   // copies in batches
  kPageableCopies,  // single or batched copies with pageable host memory on one side
  kFills,
  kLaunches,        // launches of kernels of this project
  kLegacyWork,      // copies, fills, launches, host functions, operators on the legacy stream
  kWaits,           // host waits for a stream, an event, the device, or a pageable copy
  kEventQueries,    // queries of events and streams
  kPointerQueries,  // queries of the kind of an address
  kDeviceQueries,   // attributes of the device and of kernels, free memory
  kCaptureQueries,  // queries of the capture status of a stream
  kAllocations,     // device allocations, pinned allocations and registrations
  kNum,
};

void count(Counter counter, long n = 1);
long count_of(Counter counter);
// Returns the name used in tests, or nullptr for a number above the last counter.
const char* name_of_counter(size_t i);

}  // namespace kvcache::gpuless
