// SPDX-License-Identifier: Apache-2.0
// Segmented LRU (Karedla, Love, Wherry 1994): blocks with a hit outlive blocks without one.
//
// A cached block is on probation until it is hit, and protected afterwards. Protected blocks (held,
// with cached children, or candidates) may occupy up to a fixed share of the pool. Above that
// share, the least recently hit or released protected block becomes the most recent block on
// probation. Blocks on probation are evicted first. Within a segment, the least recently released
// block is evicted first. The default share is in registry.cpp.
#pragma once

#include <utility>

#include "core/eviction/eviction_policy.h"
#include "core/eviction/ranked.h"
#include "core/zeroed_array.h"

namespace kvcache {

class SegmentedLru : public EvictionPolicy {
 public:
  SegmentedLru(int64_t num_blocks, double protected_share)
      : most_protected_(static_cast<size_t>(protected_share * static_cast<double>(num_blocks - 1))),
        recency_(static_cast<size_t>(num_blocks)),
        protected_(num_blocks),
        candidates_(num_blocks) {}

  void insert(BlockId id) override { candidates_.set(id, {protected_.has(id), recency_[id]}); }
  void remove(BlockId id) override { candidates_.erase(id); }
  BlockId victim() override { return candidates_.top(); }

  void on_hit(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      touch(ids[i]);
      protected_.set(ids[i], recency_[ids[i]]);
      refresh(ids[i]);
    }
    while (protected_.size() > most_protected_) {
      const BlockId id = protected_.top();
      protected_.erase(id);
      touch(id);
      refresh(id);
    }
  }
  void on_idle(BlockId id) override {
    touch(id);
    if (protected_.has(id)) protected_.set(id, recency_[id]);
  }
  void on_forget(BlockId id, const Hash*, uint8_t, bool) override { protected_.erase(id); }
  void clear() override {
    protected_.clear();
    candidates_.clear();
  }
  size_t num_bytes() const override {
    return sizeof(*this) + recency_.num_bytes() + protected_.num_bytes() + candidates_.num_bytes();
  }

 private:
  void touch(BlockId id) { recency_[id] = ++num_touched_; }
  void refresh(BlockId id) {  // updates the rank of a candidate
    if (candidates_.has(id)) insert(id);
  }

  size_t most_protected_;
  ZeroedArray<int64_t> recency_;
  Ranked<int64_t> protected_;                    // all protected cached blocks
  Ranked<std::pair<bool, int64_t>> candidates_;  // eviction candidates, blocks on probation first
  int64_t num_touched_ = 0;
};

}  // namespace kvcache
