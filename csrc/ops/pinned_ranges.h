// SPDX-License-Identifier: Apache-2.0
// Host memory pinned by this library, and its device addresses.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace kvcache {

// Caches the result of the driver query for each pinned range as long as the range is registered. A
// query takes about a microsecond, and a copy may have a hundred regions. Results for memory that
// other libraries pinned are not cached here, because this library would not learn of its
// unpinning. `PageCopy`, which keeps such memory alive, avoids repeated queries with kLocated.
class PinnedRanges {
 public:
  static PinnedRanges& instance() {
    static PinnedRanges ranges;
    return ranges;
  }

  void add(const char* begin, int64_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_[begin] = {begin + num_bytes, {}};
  }

  // Must be called before the range is unpinned.
  void remove(const char* begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(begin);
  }

  // Returns the result of ask(host), which is the device address of `host` minus the host address,
  // or nullopt if there is no device address. `ask` is called only once per range and device, but
  // every time for addresses outside all ranges.
  template <class Ask>
  std::optional<int64_t> shift(int32_t device, const char* host, Ask&& ask) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto range = ranges_.upper_bound(host);
    if (range == ranges_.begin() || host >= (--range)->second.end) return ask(host);
    std::map<int32_t, int64_t>& shifts = range->second.shifts;
    if (const auto known = shifts.find(device); known != shifts.end()) return known->second;
    const std::optional<int64_t> found = ask(host);
    if (found) shifts.emplace(device, *found);
    return found;
  }

 private:
  struct Range {
    const char* end;
    std::map<int32_t, int64_t> shifts;  // shift for each device
  };

  std::mutex mutex_;
  std::map<const char*, Range> ranges_;  // keyed by the range's first byte
};

}  // namespace kvcache
