// SPDX-License-Identifier: Apache-2.0
// Evicts the block whose last access is earliest. Ties are broken by longest prefix, then by
// release order.
//
// A block's access time is the value of `now` at its last access; later releases do not change it.
// A block that was never accessed is ordered by its last release instead: by the caller's clock at
// that time (the largest `now` so far, or 0 before the first access), then by the logical time of
// the release. If no block is ever accessed, blocks are therefore evicted in the order of their
// releases and, within a release, longest prefix first.
#pragma once

#include <algorithm>
#include <tuple>

#include "core/eviction/ranked.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"
#include "core/zeroed_array.h"

namespace kvcache {

class LastAccess : public EvictionOrder, public BlockListener {
 public:
  explicit LastAccess(int64_t num_blocks)
      : states_(static_cast<size_t>(num_blocks)), candidates_(num_blocks) {}

  void insert(BlockId id) override {
    const State& state = states_[id];
    candidates_.set(id, {state.time, state.tick, -state.num_prefix_tokens, state.idle});
  }
  void remove(BlockId id) override { candidates_.erase(id); }
  BlockId victim() override { return candidates_.top(); }

  void on_release(const Released& released) override {
    if (released.access.number > 0) return record(released, released.access);
    if (released.hit_ends != nullptr) return;
    if (released.features != nullptr) {
      logical_time_ = released.features->logical_time;
      for (int64_t i = 0; i < released.n; ++i) {
        states_[released.ids[i]].num_prefix_tokens = released.prefix_tokens[i];
        refresh(released.ids[i]);
      }
    }
    for (const BlockId id : released) {
      State& state = states_[id];
      state.announced_time = view().clock.access_time;
      state.told_tick = logical_time_;
      state.is_told = true;
    }
  }
  void on_idle(const Blocks& blocks) override {
    for (const BlockId id : blocks) {
      State& state = states_[id];
      state.idle = ++num_idle_;
      // A fence may have delayed this call, so the time recorded at the release is used.
      if (!state.is_accessed) {
        state.time = state.is_told ? state.announced_time : view().clock.access_time;
        state.tick = state.is_told ? state.told_tick : logical_time_;
      }
      state.is_told = false;
    }
  }
  // Later records of earlier accesses are ignored.
  void on_forget(const Forgotten& forgotten) override {
    for (const BlockId id : forgotten) {
      states_[id] = {};
      states_[id].last_access = view().clock.num_accesses;
    }
    if (forgotten.why == Forgotten::Why::kReset) cleared_at_ = view().clock.num_accesses;
  }
  size_t num_bytes() const override {
    return sizeof(*this) + states_.num_bytes() + candidates_.num_bytes();
  }

 private:
  // Among blocks with equal times, accessed blocks are evicted before released blocks, because a
  // release at the same time counts as later than an access.
  static constexpr int64_t kAccessed = INT64_MIN;
  struct State {
    double time;
    int64_t tick;  // logical time of the release, or kAccessed
    int64_t num_prefix_tokens;
    int64_t idle;           // number of the release, counted over all blocks
    double announced_time;  // time of a release that was announced but has not taken effect
    int64_t told_tick;
    // Number of the block's last access, or of the pool's last access when the block was forgotten.
    int64_t last_access;
    bool is_told;
    bool is_accessed;
  };
  void record(const Blocks& blocks, const Access& access) {
    for (const BlockId id : blocks) {
      State& state = states_[id];
      if (access.number <= std::max(state.last_access, cleared_at_)) continue;
      state.last_access = access.number;
      state.is_accessed = true;
      state.time = access.now;
      state.tick = kAccessed;
      refresh(id);
    }
  }
  void refresh(BlockId id) {  // updates the rank of a candidate
    if (candidates_.has(id)) insert(id);
  }

  ZeroedArray<State> states_;
  Ranked<std::tuple<double, int64_t, int64_t, int64_t>> candidates_;
  int64_t cleared_at_ = 0;  // the last access before the pool was reset
  int64_t logical_time_ = 0;
  int64_t num_idle_ = 0;
};

}  // namespace kvcache
