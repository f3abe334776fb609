// SPDX-License-Identifier: Apache-2.0
// Evicts the pages of a second tier that are least worth keeping, based on the statistics learned
// by the first tier's policy.
//
// A page holds a copy of a block, with that block's class and release time. Copies of blocks that
// were loaded into the first tier are evicted first, because they are redundant.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/eviction/learned/copied_segment.h"
#include "core/eviction/learned/eviction_policy.h"
#include "core/eviction/learned/loose_segment.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/worth_order.h"

namespace kvcache {

class LearnedCopies : public EvictionPolicy {
 public:
  LearnedCopies(int64_t num_pages, std::shared_ptr<ReuseModel> model)
      : model_(std::move(model)), segments_(num_pages), order_(model_.get(), &segments_) {
    model_->add_blocks(num_pages);
  }

  void insert(BlockId id) override { segments_.insert(id); }
  void remove(BlockId id) override { segments_.remove(id); }
  BlockId choose() override { return order_.victim(); }

  void on_copy(BlockId id, const ReleasedAs& as) override {
    if (as.segment == 0) return;
    segments_.assign(id, copies_.at(as, &segments_));
  }
  void on_load(BlockId id) override {
    segments_.assign(id, loaded_.at(model_->clock(), ReuseClass::kLoaded, &segments_));
  }
  void on_idle(BlockId id) override {
    if (segments_.of(id) != Segments::kNone) return;
    segments_.assign(id, loose_.at(model_->clock(), ReuseClass::kLoose, &segments_));
  }
  void on_forget(BlockId id, const Hash*, uint8_t, bool) override {
    segments_.assign(id, Segments::kNone);
  }
  void clear() override {
    segments_.clear();
    order_.clear();
    copies_.clear();
    loaded_.clear();
    loose_.clear();
  }
  double gain_of_copy(const ReleasedAs& as, bool evicts) override {
    if (as.segment == 0) return 1;
    const BlockId victim = evicts ? order_.victim() : kNullBlock;
    return model_->gain(as, victim == kNullBlock ? 0 : order_.worth(segments_.of(victim)));
  }
  size_t num_bytes() const override { return sizeof(*this) + segments_.num_bytes(); }

 private:
  std::shared_ptr<ReuseModel> model_;
  Segments segments_;
  WorthOrder order_;
  CopiedSegment copies_;
  LooseSegment loose_, loaded_;
};

}  // namespace kvcache
