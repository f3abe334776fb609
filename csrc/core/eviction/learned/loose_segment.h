// SPDX-License-Identifier: Apache-2.0
// Assigns segments to blocks that were not released by a request.
#pragma once

#include <cstdint>

#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"

namespace kvcache {

class LooseSegment {
 public:
  // Returns the segment for a block that has become idle. Opens a new segment if the last one is
  // full or too old.
  int32_t at(int64_t time, int reuse_class, Segments* segments) {
    const Segments::Segment& last = (*segments)[last_];
    const bool is_open = last_ != Segments::kNone && last.num_blocks > 0 &&
                         last.num_blocks < kMostBlocks && last.reuse_class == reuse_class &&
                         static_cast<double>(time - last.time) < ReuseModel::kFirstBucket;
    if (!is_open) last_ = segments->open(time, reuse_class);
    return last_;
  }
  void clear() { last_ = Segments::kNone; }

 private:
  static constexpr int32_t kMostBlocks = 64;

  int32_t last_ = Segments::kNone;
};

}  // namespace kvcache
