// SPDX-License-Identifier: Apache-2.0
// A segment for blocks that formed one segment in another tier and arrive in this tier one by one.
#pragma once

#include <cstdint>

#include "core/eviction/learned/last_segment.h"
#include "core/eviction/learned/segments.h"

namespace kvcache {

class CopiedSegment {
 public:
  int32_t at(const ReleasedAs& as, Segments* segments) {
    const int32_t last = last_.in(*segments);
    if (last != Segments::kNone && as.segment == of_) return last;
    of_ = as.segment;
    return last_.set(segments->open(as.time, as.reuse_class, as.num_forks, as.cost), *segments);
  }
  void clear() { last_.clear(); }

 private:
  LastSegment last_;
  int64_t of_ = 0;
};

}  // namespace kvcache
