// SPDX-License-Identifier: Apache-2.0
// Evicts blocks that no request has hit first. Within both segments, the least recently released
// block is evicted first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

class SegmentedLru : public EvictionOrder, public BlockListener {
 public:
  explicit SegmentedLru(int64_t num_blocks) : states_(static_cast<size_t>(num_blocks)) {}

  void insert(BlockId id) override { candidates_.insert(rank_of(id)); }
  void remove(BlockId id) override { candidates_.erase(rank_of(id)); }
  BlockId victim() override {
    return candidates_.empty() ? kNullBlock : std::get<BlockId>(*candidates_.begin());
  }
  size_t num_bytes() const override { return states_.capacity() * sizeof(State); }

  // A hit block may still be a candidate, so its rank changes only when it is released again.
  void on_hit(const Hit& hit) override {
    for (const BlockId id : hit) states_[id].was_hit |= hit.by == Hit::By::kRequest;
  }
  void on_idle(const Blocks& blocks) override {
    for (const BlockId id : blocks) {
      states_[id].is_protected = states_[id].was_hit;
      states_[id].release = ++num_releases_;
    }
  }
  void on_forget(const Forgotten& forgotten) override {
    for (const BlockId id : forgotten) states_[id] = {};
  }

 private:
  struct State {
    int64_t release = 0;
    bool was_hit = false, is_protected = false;
  };
  using Rank = std::tuple<bool, int64_t, BlockId>;
  Rank rank_of(BlockId id) const { return {states_[id].is_protected, states_[id].release, id}; }

  std::vector<State> states_;  // by block
  std::set<Rank> candidates_;
  int64_t num_releases_ = 0;
};

}  // namespace kvcache
