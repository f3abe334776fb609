// SPDX-License-Identifier: Apache-2.0
// Evicts the pages of a second tier that are least worth keeping, based on what the first tier's
// policy has learned.
//
// A page holds a copy of a block, with that block's class and release time. Copies of blocks that
// were loaded into the first tier are evicted first, because they are redundant.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/eviction/learned.h"

namespace kvcache {

class LearnedCopies : public EvictionOrder, public BlockListener {
 public:
  LearnedCopies(int64_t num_pages, std::shared_ptr<const LearnedReuse> reuse)
      : reuse_(std::move(reuse)), segments_(num_pages) {}

  // A held page holds, or will hold, a copy of a block in this segment of the first tier.
  void copy(BlockId page, const Segments::Segment& of) {
    if (of.number != 0) segments_.assign_like(page, of.number, of.time, of.reuse_class);
  }
  // Returns the expected number of hits of a copy of a block in this segment, minus the value of
  // the space that the copy would occupy; 1 if nothing is known of the block. `evicts`: the copy
  // would evict a page.
  double gain_of_copy(const Segments::Segment& of, bool evicts) {
    if (of.number == 0) return 1;
    const BlockId page = evicts ? victim() : kNullBlock;
    const Segments::Segment& evicted = segments_.segment_of(page);
    const double price =
        page == kNullBlock ? 0 : Segments::value(evicted, &reuse_->hazards, reuse_->clock);
    return reuse_->hazards.gain(of.reuse_class, reuse_->clock - of.time, price);
  }

  void insert(BlockId id) override { segments_.insert(id); }
  void remove(BlockId id) override { segments_.remove(id); }
  BlockId victim() override { return segments_.victim(reuse_->order(), reuse_->clock); }
  size_t num_bytes() const override { return sizeof(*this) + segments_.num_bytes(); }

  void on_hit(const Hit& batch) override {
    if (batch.by != Hit::By::kOtherTier) return;
    for (const BlockId id : batch) {
      segments_.assign_like(id, 0, reuse_->clock, ReuseClass::kLoaded);
    }
  }
  void on_idle(const Blocks& batch) override {
    for (const BlockId id : batch) {
      if (segments_.of(id) != Segments::kNone) continue;
      segments_.assign_like(id, 0, reuse_->clock, ReuseClass::kLoose);
    }
  }
  void on_forget(const Forgotten& batch) override {
    if (batch.why == Forgotten::Why::kReset) return segments_.clear();
    for (const BlockId id : batch) segments_.assign(id, Segments::kNone);
  }

 private:
  std::shared_ptr<const LearnedReuse> reuse_;
  Segments segments_;
};

}  // namespace kvcache
