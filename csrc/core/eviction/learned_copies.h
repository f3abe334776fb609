// SPDX-License-Identifier: Apache-2.0
// Evicts the pages of a second tier that are least worth keeping, based on what the first tier's
// policy has learned.
//
// A page holds a copy of a block, with that block's class and release time. Copies of blocks that
// were loaded into the first tier are evicted first, because they are redundant.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "core/eviction/learned.h"

namespace kvcache {

class LearnedCopies : public EvictionOrder, public BlockListener {
 public:
  LearnedCopies(int64_t num_pages, std::shared_ptr<const LearnedReuse> reuse)
      : reuse_(std::move(reuse)), segments_(num_pages) {}

  // A copy of this block will be published, or was published before and is confirmed.
  void expect(const Hash& hash, uint8_t group, const ReleasedAs& as) {
    const uint32_t key = Hazards::key_of(hash, group);
    expected_.erase(key);
    if (as.segment != 0) expected_[key] = as;
  }
  // Called when all expected copies of a step were published or confirmed.
  void expect_none() { expected_.clear(); }
  // Returns the expected number of hits of a copy of a block, minus the value of the space that the
  // copy would occupy; 1 if nothing is known of the block. `evicts`: the copy would evict a page.
  double gain_of_copy(const ReleasedAs& as, bool evicts) {
    if (as.segment == 0) return 1;
    const uint32_t s = evicts ? segments_.choose(reuse_->order(), reuse_->clock) : Segments::kNone;
    const double price =
        s == Segments::kNone ? 0 : Segments::value(segments_[s], &reuse_->hazards, reuse_->clock);
    return reuse_->hazards.gain(as.reuse_class, reuse_->clock - as.time, price);
  }

  void insert(BlockId id) override { segments_.insert(id); }
  void remove(BlockId id) override { segments_.remove(id); }
  BlockId victim() override {
    const uint32_t s = segments_.choose(reuse_->order(), reuse_->clock);
    return s == Segments::kNone ? kNullBlock : segments_[s].first;
  }
  size_t num_bytes() const override { return sizeof(*this) + segments_.num_bytes(); }

  void on_publish(const Published& batch) override {
    if (batch.copied == nullptr) return;
    const auto found = expected_.find(Hazards::key_of(batch.copied->hash, batch.group));
    if (found == expected_.end()) return;
    const ReleasedAs as = found->second;
    expected_.erase(found);
    assign(batch.ids[0], as.segment, as.reuse_class, as.time);
  }
  void on_hit(const Hit& batch) override {
    if (batch.by != Hit::By::kOtherTier) return;
    for (const BlockId id : batch) assign(id, 0, ReuseClass::kLoaded, reuse_->clock);
  }
  void on_idle(const Blocks& batch) override {
    for (const BlockId id : batch) {
      if (segments_.of(id) == Segments::kNone) assign(id, 0, ReuseClass::kLoose, reuse_->clock);
    }
  }
  void on_forget(const Forgotten& batch) override {
    if (batch.why == Forgotten::Why::kReset) {
      segments_.clear();
      expected_.clear();
      open_ = Segments::kNone;
    } else if (batch.why != Forgotten::Why::kFreed) {
      for (const BlockId id : batch) assign(id, 0, -1, 0);
    }
  }

 private:
  // Assigns a held page to a segment; class -1: to none. Pages whose blocks were in the same
  // segment form a segment if they arrive one after the other.
  void assign(BlockId id, uint32_t number, int reuse_class, int64_t time) {
    if (reuse_class >= 0 &&
        (open_ == Segments::kNone || number != number_ ||
         segments_[open_].reuse_class != reuse_class || segments_[open_].time != time)) {
      open_ = segments_.open(time, reuse_class);
      number_ = number;
    }
    const uint32_t before = segments_.of(id);
    if (before == open_ && segments_[before].num_blocks == 1 && reuse_class < 0) {
      open_ = Segments::kNone;
    }
    segments_.assign(id, reuse_class < 0 ? Segments::kNone : open_);
  }

  std::shared_ptr<const LearnedReuse> reuse_;
  Segments segments_;
  std::unordered_map<uint32_t, ReleasedAs> expected_;  // by key; writes of the current step
  uint32_t open_ = Segments::kNone;  // segment to which the last page was assigned
  uint32_t number_ = 0;              // number of the device's segment
};

}  // namespace kvcache
