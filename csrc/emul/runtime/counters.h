// What was asked of the runtime so far, by kind: tests assert what a path costs by differences.
// Performance faults that only a device would show as time become numbers here.
#pragma once

#include <cstddef>

namespace kvcache::gpuless {

enum class Counter {
  kCopies,          // single copies
  kBatches,         // calls of cudaMemcpyBatchAsync
  kBatchedCopies,   // copies in them
  kPageableCopies,  // single or batched, with one side that is pageable host memory
  kFills,
  kLaunches,        // of this project's kernels
  kLegacyWork,      // copies, fills, launches, host functions, operators on the legacy stream
  kWaits,           // of the host for a stream, an event, the device, or a pageable copy
  kEventQueries,    // of events and streams
  kPointerQueries,  // what an address is
  kDeviceQueries,   // attributes of the device and of kernels, free memory
  kCaptureQueries,  // whether a stream is captured
  kAllocations,     // on the device, pinned, registered
  kNum,
};

void count(Counter counter, long n = 1);
long count_of(Counter counter);
// The name that tests use; nullptr past the last.
const char* name_of_counter(size_t i);

}  // namespace kvcache::gpuless
