// SPDX-License-Identifier: Apache-2.0
// A segment for blocks that formed one segment in another tier and arrive in this tier one by one.
#pragma once

#include <cstdint>

#include "core/eviction/learned/segments.h"

namespace kvcache {

class CopiedSegment {
 public:
  int32_t at(const ReleasedAs& as, Segments* segments) {
    const Segments::Segment& last = (*segments)[last_];
    const bool is_open = last_ != Segments::kNone && last.num_blocks > 0 && last.number == number_;
    if (!is_open || as.segment != of_) {
      last_ = segments->open(as.time, as.reuse_class, as.num_forks, as.cost);
      number_ = (*segments)[last_].number;
      of_ = as.segment;
    }
    return last_;
  }
  void clear() { last_ = Segments::kNone; }

 private:
  int32_t last_ = Segments::kNone;
  int64_t number_ = 0, of_ = 0;
};

}  // namespace kvcache
