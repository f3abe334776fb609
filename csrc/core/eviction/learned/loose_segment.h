// SPDX-License-Identifier: Apache-2.0
// Assigns segments to blocks that were not released by a request.
#pragma once

#include <cstdint>

#include "core/eviction/learned/last_segment.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"

namespace kvcache {

class LooseSegment {
 public:
  // Returns the segment for a block that has become idle. Opens a new segment if the last one is
  // full or too old.
  int32_t at(int64_t time, int reuse_class, Segments* segments) {
    const int32_t last = last_.in(*segments);
    const Segments::Segment& segment = (*segments)[last];
    const bool is_open = last != Segments::kNone && segment.num_blocks < kMostBlocks &&
                         segment.reuse_class == reuse_class &&
                         static_cast<double>(time - segment.time) < ReuseModel::kFirstBucket;
    return is_open ? last : last_.set(segments->open(time, reuse_class), *segments);
  }
  void clear() { last_.clear(); }

 private:
  static constexpr int32_t kMostBlocks = 64;

  LastSegment last_;
};

}  // namespace kvcache
