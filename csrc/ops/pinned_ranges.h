// The host memory that this library has pinned, and the device's addresses of it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace kvcache {

// Remembers what the driver has said of each pinned range, from the range's registration to its
// end. A question to the driver takes about a microsecond, and a copy may concern a hundred
// regions. Memory that others have pinned is not known here: nobody would say when they unpin it.
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

  // Called before the range is unpinned.
  void remove(const char* begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(begin);
  }

  // What ask(host) says: the device's address of `host` minus the host's, nullopt where it has
  // none. `ask` is called once per range and device, and for every address outside of all ranges.
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
    std::map<int32_t, int64_t> shifts;  // by device
  };

  std::mutex mutex_;
  std::map<const char*, Range> ranges_;  // by their first byte
};

}  // namespace kvcache
