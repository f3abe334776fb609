// SPDX-License-Identifier: Apache-2.0
// Evicts by priority, lowest first, then least recently released.
//
// A release may assign priorities, with a time to live, to ranges of its tokens. A block is
// assigned the highest priority whose range overlaps its tokens, and among equal priorities the one
// that expires last. The new priority replaces an earlier one. A release without a priority for a
// block does not change its priority. Blocks without a priority, or with an expired one, have the
// default priority.
#pragma once

#include <cstdint>
#include <utility>

#include "core/eviction/given_priority.h"
#include "core/eviction/ranked.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"
#include "core/zeroed_array.h"

namespace kvcache {

class Priority : public EvictionOrder, public BlockListener {
 public:
  Priority(int64_t num_blocks, int32_t default_priority)
      : default_priority_(default_priority),
        states_(static_cast<size_t>(num_blocks)),
        candidates_(num_blocks),
        ends_(num_blocks) {}

  void insert(BlockId id) override {
    const State& state = states_[id];
    const bool is_given = state.is_given && state.end > now();
    candidates_.set(id, {is_given ? state.priority : default_priority_, state.idle});
    is_given ? ends_.set(id, {state.end, id}) : ends_.erase(id);
  }
  void remove(BlockId id) override {
    candidates_.erase(id);
    ends_.erase(id);
  }
  BlockId victim() override {
    while (ends_.size() > 0 && ends_.top_key().first <= now()) insert(ends_.top());
    return candidates_.top();
  }

  void on_release(const Released& released) override {
    if (released.features == nullptr || released.features->num_retention == 0) return;
    for (int64_t i = 0; i < released.n; ++i) {
      const GivenPriority given =
          GivenPriority::of(released.prefix_tokens[i], *released.features, now());
      if (given.priority < 0) continue;
      State& state = states_[released.ids[i]];
      state.priority = given.priority;
      state.end = given.end;
      state.is_given = true;
      if (candidates_.has(released.ids[i])) insert(released.ids[i]);
    }
  }
  void on_idle(const Blocks& blocks) override {
    for (const BlockId id : blocks) states_[id].idle = ++num_idle_;
  }
  void on_forget(const Forgotten& forgotten) override {
    for (const BlockId id : forgotten) states_[id] = {};
  }
  size_t num_bytes() const override {
    return sizeof(*this) + states_.num_bytes() + candidates_.num_bytes() + ends_.num_bytes();
  }

 private:
  struct State {
    int64_t end;   // time at which the priority expires
    int64_t idle;  // number of the release, counted over all blocks
    int32_t priority;
    bool is_given;
  };
  int64_t now() const { return view().clock.now_ms; }

  int32_t default_priority_;
  ZeroedArray<State> states_;
  Ranked<std::pair<int32_t, int64_t>> candidates_;
  Ranked<std::pair<int64_t, BlockId>> ends_;  // candidates with an assigned priority
  int64_t num_idle_ = 0;
};

}  // namespace kvcache
