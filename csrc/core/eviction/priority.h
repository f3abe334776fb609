// SPDX-License-Identifier: Apache-2.0
// Evicts by priority, lowest first, and blocks of the default priority in the order of another
// policy.
//
// A release may assign priorities, with a time to live, to ranges of its tokens. A block is
// assigned the highest priority whose range overlaps its tokens, and among equal priorities the one
// that expires last. The new priority replaces an earlier one. A release without a priority for a
// block does not change its priority. Blocks without a priority, or with an expired one, have the
// default priority. Blocks of another priority are evicted in the order of their releases.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/eviction/given_priority.h"
#include "core/eviction/ranked.h"
#include "core/pool/block_listener.h"
#include "core/zeroed_array.h"

namespace kvcache {

template <class Order>  // an order and a listener, which orders the blocks of the default priority
class WithPriorities : public Order {
 public:
  WithPriorities(int64_t num_blocks, int32_t default_priority)
      : Order(num_blocks), num_blocks_(num_blocks), default_priority_(default_priority) {}

  void insert(BlockId id) override {
    if (!given_ || !given_->states[id].is_given || given_->states[id].end <= now()) {
      return Order::insert(id);
    }
    const State& state = given_->states[id];
    given_->candidates.set(id, {state.priority, state.idle});
    given_->ends.set(id, {state.end, id});
  }
  void remove(BlockId id) override {
    if (!is_listed(id)) return Order::remove(id);
    given_->candidates.erase(id);
    given_->ends.erase(id);
  }
  BlockId victim() override {
    if (!given_) return Order::victim();
    while (given_->ends.size() > 0 && given_->ends.top_key().first <= now()) {
      const BlockId id = given_->ends.top();
      remove(id);
      insert(id);
    }
    const BlockId first = given_->candidates.top();
    if (first != kNullBlock && given_->candidates.top_key().first < default_priority_) return first;
    const BlockId id = Order::victim();
    return id != kNullBlock ? id : first;
  }

  void on_release(const Released& released) override {
    Order::on_release(released);
    if (released.features == nullptr || released.features->num_retention == 0) return;
    if (!given_) given_ = std::make_unique<Given>(num_blocks_);
    for (int64_t i = 0; i < released.n; ++i) {
      const BlockId id = released.ids[i];
      const GivenPriority given =
          GivenPriority::of(released.prefix_tokens[i], *released.features, now());
      if (given.is_set()) give(id, given);  // otherwise, the block keeps its priority
    }
  }
  void on_idle(const Blocks& blocks) override {
    Order::on_idle(blocks);
    if (!given_) return;
    for (const BlockId id : blocks) given_->states[id].idle = ++num_idle_;
  }
  void on_forget(const Forgotten& forgotten) override {
    Order::on_forget(forgotten);
    if (!given_) return;
    for (const BlockId id : forgotten) given_->states[id] = {};
  }
  size_t num_bytes() const override {
    return Order::num_bytes() + (given_ ? given_->num_bytes() : 0);
  }

 private:
  struct State {
    int64_t end;   // time at which the priority expires
    int64_t idle;  // number of the release, counted over all blocks
    int32_t priority;
    bool is_given;  // a priority other than the default one
  };
  struct Given {
    explicit Given(int64_t num_blocks)
        : states(static_cast<size_t>(num_blocks)), candidates(num_blocks), ends(num_blocks) {}

    size_t num_bytes() const {
      return states.num_bytes() + candidates.num_bytes() + ends.num_bytes();
    }

    ZeroedArray<State> states;
    Ranked<std::pair<int32_t, int64_t>> candidates;
    Ranked<std::pair<int64_t, BlockId>> ends;  // of candidates
  };

  int64_t now() const { return this->view().clock.now_ms; }
  bool is_listed(BlockId id) const { return given_ && given_->candidates.has(id); }
  void give(BlockId id, const GivenPriority& given) {
    const bool is_candidate = is_listed(id) || Order::is_candidate(id);
    if (is_candidate) remove(id);
    State& state = given_->states[id];
    state.priority = given.priority;
    state.end = given.end;
    state.is_given = given.priority != default_priority_;
    if (is_candidate) insert(id);
  }

  int64_t num_blocks_;
  int32_t default_priority_;
  std::unique_ptr<Given> given_;  // set when a release assigns a priority
  int64_t num_idle_ = 0;
};

}  // namespace kvcache
