// SPDX-License-Identifier: Apache-2.0
// Chooses the segment of a pool that is least worth keeping.
#pragma once

#include <cstdint>

#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"

namespace kvcache {

// Segments with copies of blocks that are also in the other tier are chosen first, followed by the
// oldest or youngest segment of the class with the lowest value. A chosen segment is evicted
// completely before another one is chosen. While there are too few records to assess the oldest
// segments, the oldest segment is chosen.
class WorthOrder {
 public:
  // `may_follow_lru`: whether the oldest segment is chosen while the policy must follow LRU.
  WorthOrder(const ReuseModel* model, Segments* segments, bool may_follow_lru = true)
      : model_(model), segments_(segments), may_follow_lru_(may_follow_lru) {}

  // Returns the first candidate of the chosen segment; the null block if there is none.
  BlockId victim() {
    const Segments& all = *segments_;
    if (!all.has_candidate(chosen_) || all[chosen_].number != number_) {
      const int32_t next = choose();
      if (next == Segments::kNone) return kNullBlock;
      chosen_ = next;
      number_ = all[chosen_].number;
    }
    return segments_->first_candidate(chosen_);
  }
  // Returns the value of keeping a segment's blocks, in hits per millisecond.
  double worth(int32_t s) const {
    const Segments::Segment& segment = (*segments_)[s];
    if (segment.reuse_class == ReuseClass::kLoaded) return 0;
    return model_->index(segment.reuse_class, segment.time) * double{segment.cost};
  }
  void clear() { chosen_ = Segments::kNone; }

 private:
  int32_t choose() const {
    const int32_t loaded = segments_->oldest(ReuseClass::kLoaded);
    if (loaded != Segments::kNone) return loaded;
    const int32_t oldest = this->oldest();
    if (oldest == Segments::kNone || (may_follow_lru_ && model_->follows_lru()) ||
        !model_->knows_since((*segments_)[oldest].time)) {
      return oldest;
    }
    return least_worth();
  }
  int32_t oldest() const {
    int32_t found = Segments::kNone;
    segments_->for_each_class([&](int c) {
      const int32_t s = segments_->oldest(c);
      if (s == Segments::kNone) return;
      if (found == Segments::kNone || is_older(s, found)) found = s;
    });
    return found;
  }
  bool is_older(int32_t s, int32_t other) const {
    const Segments::Segment &one = (*segments_)[s], &two = (*segments_)[other];
    return one.time < two.time || (one.time == two.time && one.number < two.number);
  }
  int32_t least_worth() const {
    int32_t found = Segments::kNone;
    double least = 0;
    segments_->for_each_class([&](int c) {
      for (const int32_t s : {segments_->oldest(c), segments_->youngest(c)}) {
        if (s == Segments::kNone) continue;
        const double worth = this->worth(s);
        const bool is_least =
            worth < least || (worth == least && is_older(s, found));  // equal within a millisecond
        if (found == Segments::kNone || is_least) found = s, least = worth;
      }
    });
    return found;
  }

  const ReuseModel* model_;
  Segments* segments_;
  bool may_follow_lru_;
  int32_t chosen_ = Segments::kNone;
  int64_t number_ = 0;
};

}  // namespace kvcache
