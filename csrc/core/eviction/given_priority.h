// SPDX-License-Identifier: Apache-2.0
// The priority that a release assigns to a block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/pool/block_listener.h"

namespace kvcache {

// If several ranges overlap a block's tokens, the highest priority applies; among equal priorities,
// the one that lasts longest.
struct GivenPriority {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  int32_t priority = -1;  // -1: no priority
  int64_t end = 0;        // time at which the priority expires, in ms

  bool is_set() const { return priority >= 0; }

  // Returns the priority that the release assigns to the last block of this prefix.
  static GivenPriority of(int64_t prefix_tokens, const ReleaseFeatures& features, int64_t now) {
    const int64_t last = prefix_tokens - 1;
    const int64_t first = last - last % features.tokens_per_block;
    GivenPriority best;
    for (int64_t i = 0; i < features.num_retention; ++i) {
      const Retention& each = features.retention[i];
      if (each.first > last || each.stop <= first || each.first == each.stop) continue;
      const bool has_end = each.ttl_ms >= 0 && each.ttl_ms < kNever - now;
      const int64_t end = has_end ? now + each.ttl_ms : kNever;
      if (each.priority > best.priority) best = {each.priority, end};
      if (each.priority == best.priority) best.end = std::max(best.end, end);
    }
    return best;
  }
};

}  // namespace kvcache
