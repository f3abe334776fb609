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
#include "core/pool/eviction_policy.h"
#include "core/zeroed_array.h"

namespace kvcache {

class LastAccess : public EvictionPolicy {
 public:
  explicit LastAccess(int64_t num_blocks)
      : states_(static_cast<size_t>(num_blocks)), candidates_(num_blocks) {}

  void insert(BlockId id) override {
    const State& state = states_[id];
    candidates_.set(id, {state.time, state.tick, -state.num_prefix_tokens, state.idle});
  }
  void remove(BlockId id) override { candidates_.erase(id); }
  BlockId victim() override { return candidates_.top(); }

  void on_allocate(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) reset(ids[i]);
  }
  void on_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                  const ReleaseFeatures& features) override {
    logical_time_ = features.logical_time;
    for (int64_t i = 0; i < n; ++i) {
      states_[ids[i]].num_prefix_tokens = prefix_tokens[i];
      refresh(ids[i]);
    }
    on_released(ids, n);
  }
  void on_released(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      State& state = states_[ids[i]];
      state.announced_time = clock_;
      state.told_tick = logical_time_;
      state.is_told = true;
    }
  }
  void on_idle(BlockId id) override {
    State& state = states_[id];
    state.idle = ++num_idle_;
    // A fence may have delayed this call, so the time recorded at the release is used.
    if (!state.is_accessed) {
      state.time = state.is_told ? state.announced_time : clock_;
      state.tick = state.is_told ? state.told_tick : logical_time_;
    }
    state.is_told = false;
  }
  Access begin_access(double now) override {
    clock_ = num_accesses_ > 0 ? std::max(clock_, now) : now;
    return {now, ++num_accesses_};
  }
  void on_access(const BlockId* ids, int64_t n, const Access& access) override {
    for (int64_t i = 0; i < n; ++i) {
      State& state = states_[ids[i]];
      if (access.number <= std::max(state.last_access, cleared_at_)) continue;
      state.last_access = access.number;
      state.is_accessed = true;
      state.time = access.now;
      state.tick = kAccessed;
      refresh(ids[i]);
    }
  }
  void on_forget(BlockId id, const Hash*, uint8_t, bool) override { reset(id); }
  void clear() override {
    states_.zero();
    cleared_at_ = num_accesses_;
    candidates_.clear();
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
    // Sequence number of the block's last access. Reallocation sets it to the number of the
    // policy's latest access, so that earlier accesses are ignored.
    int64_t last_access;
    bool is_told;
    bool is_accessed;
  };
  void reset(BlockId id) {
    states_[id] = {};
    states_[id].last_access = num_accesses_;
  }
  void refresh(BlockId id) {  // updates the rank of a candidate
    if (candidates_.has(id)) insert(id);
  }

  ZeroedArray<State> states_;
  Ranked<std::tuple<double, int64_t, int64_t, int64_t>> candidates_;
  double clock_ = 0;
  int64_t num_accesses_ = 0, cleared_at_ = 0;
  int64_t logical_time_ = 0;
  int64_t num_idle_ = 0;
};

}  // namespace kvcache
