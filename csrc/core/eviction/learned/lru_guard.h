// SPDX-License-Identifier: Apache-2.0
// Limits how many hits a policy may lose compared with LRU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/shadow_lru.h"
#include "core/eviction/learned/shadow_worth.h"
#include "core/eviction/learned/trials.h"
#include "core/hash.h"
#include "core/pool/simulated_cache.h"

namespace kvcache {

// Simulates two pools of the same size as the real one and counts the hits of all three. The first
// simulated pool uses LRU. The second one evicts by value; it exists only while the policy follows
// LRU. From the counts, `Trials` decides whether the policy must follow LRU.
//
// By default, the guard simulates a sample of the blocks, and counts each use of a block. If a hit
// needs more than a chain of device blocks, `compare_requests` makes it simulate all blocks and the
// host tier. The caller then determines the hits of each request.
class LruGuard {
 public:
  LruGuard(const LruGuard&) = delete;
  LruGuard(int64_t num_blocks, ReuseModel* model)
      : LruGuard(num_blocks, std::max<int64_t>((num_blocks - 1) / kMostSampled, 1), model) {}

  void compare_requests(int64_t num_blocks, int64_t num_host_blocks) {
    compares_requests_ = true;
    last_sampled_ = UINT32_MAX;
    if (num_host_blocks > 0) {
      host_ = std::make_unique<ShadowLru>(std::max<int64_t>(num_host_blocks - 1, 1));
    }
    lru_ = ShadowLru(std::max<int64_t>(num_blocks - 1, 1), host_.get());
    trials_ = Trials(lru_.capacity());
  }

  // Whether the policy must follow LRU.
  bool falls_back() const { return by_value_ != nullptr; }

  // Records that a request uses a block and holds it from now on. `is_hit`: whether the pool had
  // cached the block. This call and the calls below have no effect for blocks that are not sampled.
  void note_use(uint32_t key, bool is_hit) {
    if (!is_sampled(key)) return;
    const bool is_hit_of_lru = lru_.hold(key);
    if (!is_hit_of_lru && host_ != nullptr && host_->contains(key)) host_->touch(key);  // loaded
    const bool is_hit_by_value = falls_back() && by_value_->hold(key);
    if (compares_requests_) return;
    count(1, int64_t{is_hit} - int64_t{is_hit_of_lru},
          int64_t{is_hit_by_value} - int64_t{is_hit_of_lru});
  }
  // Records that a request releases the blocks of the following calls of `note_release`, as a
  // segment. The block stays held until the call of `note_idle`.
  void open_segment(int reuse_class, int num_forks, float cost) {
    if (falls_back()) by_value_->open(reuse_class, num_forks, cost);
  }
  void note_release(uint32_t key) {
    if (falls_back() && is_sampled(key)) by_value_->release(key);
  }
  // Records that a block is assigned to a class of blocks without a reported release.
  void note_loose(uint32_t key, int reuse_class) {
    if (falls_back() && is_sampled(key)) by_value_->assign_loose(key, reuse_class);
  }
  // Records that no request holds the block any more. Must be called in the order in which LRU
  // would evict the blocks.
  void note_idle(uint32_t key) {
    if (!is_sampled(key)) return;
    lru_.release(key);
    if (falls_back()) by_value_->make_idle(key);
  }
  // Records that a block has lost its hash for a reason other than eviction.
  void forget(uint32_t key) {
    if (!is_sampled(key)) return;
    lru_.remove(key);
    if (falls_back()) by_value_->remove(key);
  }

  // The simulated LRU pool, followed by the simulated pool that evicts by value if it exists; null
  // before `compare_requests`.
  SimulatedCache* simulated() { return compares_requests_ ? &simulated_lru_ : nullptr; }

  void clear() {  // the device caches nothing
    lru_.clear();
    if (falls_back()) by_value_->clear();
  }
  size_t num_bytes() const {
    return lru_.num_bytes() + (host_ == nullptr ? 0 : host_->num_bytes()) +
           (by_value_ == nullptr ? 0 : by_value_->num_bytes());
  }

 private:
  // The simulated pools with which the manager compares each request.
  class SimulatedLru final : public SimulatedCache {
   public:
    explicit SimulatedLru(LruGuard* guard) : guard_(*guard) {}
    bool has(const Hash& hash, uint8_t group, bool on_host) const override {
      return guard_.has_in_lru(ReuseModel::key_of(hash, group), on_host);
    }
    bool has_host() const override { return guard_.host_ != nullptr; }
    void clear_host() override {
      if (has_host()) guard_.host_->clear();
    }
    void use_end(const Hash& hash, uint8_t group) override {
      const uint32_t key = ReuseModel::key_of(hash, group);
      if (guard_.has_in_lru(key, /*on_host=*/true)) guard_.lru_.touch(key);
    }
    void note_admission(int64_t num_blocks, int64_t num_hit, int64_t num_simulated) override {
      guard_.num_hit_lru_ = num_simulated;
      if (!guard_.falls_back()) guard_.count(num_blocks, num_hit - num_simulated, 0);
    }
    SimulatedCache* next() override {
      return guard_.falls_back() ? &guard_.simulated_by_value_ : nullptr;
    }

   private:
    LruGuard& guard_;
  };
  class SimulatedByValue final : public SimulatedCache {
   public:
    explicit SimulatedByValue(LruGuard* guard) : guard_(*guard) {}
    bool has(const Hash& hash, uint8_t group, bool on_host) const override {
      return guard_.by_value_->contains(ReuseModel::key_of(hash, group), on_host);
    }
    bool has_host() const override { return guard_.host_ != nullptr; }
    void clear_host() override { guard_.by_value_->clear_host(); }
    void use_end(const Hash& hash, uint8_t group) override {
      guard_.by_value_->note_end(ReuseModel::key_of(hash, group));
    }
    void note_admission(int64_t num_blocks, int64_t num_hit, int64_t num_simulated) override {
      const int64_t num_lru = guard_.num_hit_lru_;
      guard_.count(num_blocks, num_hit - num_lru, num_simulated - num_lru);
    }

   private:
    LruGuard& guard_;
  };

  static constexpr int64_t kMostSampled = 4'096;  // the sample has fewer than twice this number

  LruGuard(int64_t num_blocks, int64_t one_of, ReuseModel* model)  // samples one of `one_of` blocks
      : model_(model),
        last_sampled_(static_cast<uint32_t>(UINT32_MAX / one_of)),
        lru_(std::max<int64_t>((num_blocks - 1) / one_of, 1)),
        trials_(lru_.capacity()) {}
  bool has_in_lru(uint32_t key, bool on_host) const {
    return lru_.contains(key) || (on_host && host_ != nullptr && host_->contains(key));
  }
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }
  // `gain`, `gain_by_value`: hits gained over LRU by the pool and by the simulated pool that evicts
  // by value.
  void count(int64_t num_used, int64_t gain, int64_t gain_by_value) {
    trials_.count(num_used, gain, gain_by_value);
    if (trials_.follows_lru() == falls_back()) return;
    by_value_ = nullptr;
    if (trials_.follows_lru()) {
      const int64_t num_host = host_ == nullptr ? 0 : host_->capacity();
      by_value_ = std::make_unique<ShadowWorth>(lru_.capacity(), num_host, model_);
    }
    model_->follow_lru(trials_.follows_lru());
  }

  ReuseModel* model_;
  bool compares_requests_ = false;
  uint32_t last_sampled_;            // keys up to this one are sampled
  std::unique_ptr<ShadowLru> host_;  // receives what `lru_` evicts; null: none
  ShadowLru lru_;
  Trials trials_;
  std::unique_ptr<ShadowWorth> by_value_;  // null during a trial
  int64_t num_hit_lru_ = 0;                // hits of the last compared request with LRU
  SimulatedLru simulated_lru_{this};
  SimulatedByValue simulated_by_value_{this};
};

}  // namespace kvcache
