// SPDX-License-Identifier: Apache-2.0
// Evicts the least recently released block, like a pool without an order, but always evicts leaves
// first. Used for the host tier, where heads of chains may arrive before tails.
#pragma once

#include "core/eviction/ranked.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"
#include "core/zeroed_array.h"

namespace kvcache {

class LeastRecent : public EvictionOrder, public BlockListener {
 public:
  explicit LeastRecent(int64_t num_blocks)
      : idle_(static_cast<size_t>(num_blocks)), candidates_(num_blocks) {}

  bool is_candidate(BlockId id) const { return candidates_.has(id); }
  void insert(BlockId id) override { candidates_.set(id, idle_[id]); }
  void remove(BlockId id) override { candidates_.erase(id); }
  BlockId victim() override { return candidates_.top(); }
  void on_idle(const Blocks& blocks) override {
    for (const BlockId id : blocks) idle_[id] = ++num_idle_;
  }
  size_t num_bytes() const override {
    return sizeof(*this) + idle_.num_bytes() + candidates_.num_bytes();
  }

 private:
  ZeroedArray<int64_t> idle_;  // number of the release, counted over all blocks
  Ranked<int64_t> candidates_;
  int64_t num_idle_ = 0;
};

}  // namespace kvcache
