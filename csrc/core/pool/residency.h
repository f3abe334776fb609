// SPDX-License-Identifier: Apache-2.0
// Measures how long blocks stay cached: from publication to eviction, and from the last release to
// eviction.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Durations in milliseconds. Bucket i counts durations below 2**i that are not in an earlier
// bucket.
struct DurationStats {
  int64_t count = 0;
  int64_t sum = 0;
  int64_t max = 0;
  std::array<int64_t, 33> buckets{};

  void add(uint32_t ms) {
    ++count;
    sum += ms;
    max = std::max<int64_t>(max, ms);
    int bucket = 0;
    while ((uint64_t{1} << bucket) <= ms) ++bucket;
    ++buckets[static_cast<size_t>(bucket)];
  }
};

class Residency {
 public:
  explicit Residency(int64_t num_blocks)
      : born_(static_cast<size_t>(num_blocks)), idle_since_(static_cast<size_t>(num_blocks)) {}

  // 32 bits are enough, because differences are valid for durations below 49 days, regardless of
  // the clock's start.
  void set_now(int64_t ms) { now_ = static_cast<uint32_t>(ms); }

  void published(BlockId id) { born_[id] = now_; }
  void released(BlockId id) { idle_since_[id] = now_; }
  void evicted(BlockId id) {
    lifetime_.add(now_ - born_[id]);
    idle_.add(now_ - idle_since_[id]);
  }
  const DurationStats& lifetime() const { return lifetime_; }
  const DurationStats& idle() const { return idle_; }
  void clear() { lifetime_ = idle_ = {}; }
  size_t num_bytes() const { return born_.num_bytes() + idle_since_.num_bytes(); }

 private:
  ZeroedArray<uint32_t> born_, idle_since_;
  uint32_t now_ = 0;
  DurationStats lifetime_, idle_;
};

}  // namespace kvcache
