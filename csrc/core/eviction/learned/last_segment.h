// SPDX-License-Identifier: Apache-2.0
// The segment that was opened last for some purpose.
#pragma once

#include <cstdint>

#include "core/eviction/learned/segments.h"

namespace kvcache {

class LastSegment {
 public:
  // Returns the segment; kNone if it has no blocks any more. In that case, its index may have been
  // reused for another segment, which has another number.
  int32_t in(const Segments& segments) const {
    const Segments::Segment& last = segments[last_];
    return last.num_blocks > 0 && last.number == number_ ? last_ : Segments::kNone;
  }
  int32_t set(int32_t s, const Segments& segments) {
    last_ = s;
    number_ = segments[s].number;
    return s;
  }
  void clear() { last_ = Segments::kNone; }

 private:
  int32_t last_ = Segments::kNone;
  int64_t number_ = 0;
};

}  // namespace kvcache
