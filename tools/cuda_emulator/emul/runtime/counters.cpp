// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/counters.h"

#include <atomic>

namespace kvcache::gpuless {
namespace {

constexpr size_t kNum = size_t(Counter::kNum);
constexpr const char* kNames[kNum] = {
    "copies",         "batches",         "batched_copies", "pageable_copies", "fills",
    "launches",       "legacy_work",     "waits",          "event_queries",   "pointer_queries",
    "device_queries", "capture_queries", "allocations",
};
// Atomic, because not every call holds the runtime's lock.
std::atomic<long> counts[kNum];

}  // namespace

void count(Counter counter, long n) { counts[size_t(counter)] += n; }
long count_of(Counter counter) { return counts[size_t(counter)]; }
const char* name_of_counter(size_t i) { return i < kNum ? kNames[i] : nullptr; }

}  // namespace kvcache::gpuless
