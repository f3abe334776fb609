// SPDX-License-Identifier: Apache-2.0
// The window and state blocks of a request whose chain is about to be released.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// A hit needs the chain and, at its end, a state or a window. These blocks therefore join the
// segment of the chain in which the hit ends, and are evicted together with it.
class EndBlocks {
 public:
  // `hit_end`: length of the hit that reads the block; kHeld: the request holds the block until the
  // request ends.
  static constexpr int64_t kHeld = std::numeric_limits<int64_t>::max();

  bool empty() const { return all_.empty(); }
  void add(BlockId id, int64_t hit_end) { all_.push_back({id, hit_end}); }
  void clear() { all_.clear(); }
  // Must be called after the last `add`.
  void sort() {
    std::sort(all_.begin(), all_.end(), [](const Entry& a, const Entry& b) {
      return a.id != b.id ? a.id < b.id : a.hit_end < b.hit_end;
    });
  }

  // Removes the blocks of the longest hit that ends in (first, stop], and of all hits in this range
  // that are longer than `num_hit`. Calls `take` once for each removed block.
  template <class Take>
  void take(int64_t first, int64_t stop, int64_t num_hit, Take take) {
    int64_t longest = 0;
    for (const Entry& each : all_) {
      const bool is_inside = first < each.hit_end && each.hit_end <= stop;
      if (is_inside && each.hit_end != kHeld) longest = std::max(longest, each.hit_end);
    }
    const int64_t least = longest > 0 ? std::min(longest - 1, num_hit) : num_hit;
    for (size_t i = 0, end; i < all_.size(); i = end) {
      bool is_taken = false;
      for (end = i; end < all_.size() && all_[end].id == all_[i].id; ++end) {
        const int64_t hit_end = all_[end].hit_end;
        is_taken |= first < hit_end && least < hit_end && hit_end <= stop;
      }
      if (!is_taken) continue;
      take(all_[i].id);
      for (size_t j = i; j < end; ++j) all_[j].hit_end = kTaken;
    }
  }

 private:
  static constexpr int64_t kTaken = -1;
  struct Entry {
    BlockId id;
    int64_t hit_end;
  };
  std::vector<Entry> all_;
};

}  // namespace kvcache
