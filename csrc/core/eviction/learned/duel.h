// SPDX-License-Identifier: Apache-2.0
// Decides whether a policy follows LRU or its own order, by simulating both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/eviction/learned/constants.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/simulated_pool.h"

namespace kvcache {

// At first, the policy follows LRU. When its own order has gained enough hits over LRU in
// simulation, in proportion to the hits of LRU, a trial begins, in which the policy uses its own
// order. The policy has a stake, a number of hits: a part of C, the number of blocks that LRU would
// hold, and a share of the hits of LRU so far. The trial ends when the lead over LRU has fallen by
// C hits from its maximum in the trial, or when the stake is lost, because the policy has that many
// hits fewer than LRU. No trial begins while more than half of the fixed part of the stake is lost.
//
// Bound: the policy has at most kShare of the hits of LRU + (1 + kStake) C + 1 hits fewer than LRU.
// Proof and assumptions: docs/eviction.md.
//
// Blocks are sampled by key, so that each simulated pool has at most kSimulated blocks.
class Duel {
 public:
  // What is compared with the hits of the simulated LRU: the hits of the pool itself, block by
  // block or request by request, or those of the simulated pool that uses the policy's own order.
  // To compare requests, all blocks are simulated.
  enum class By : uint8_t { kBlock, kRequest, kSimulation };
  // `num_host`: blocks that another tier caches in addition.
  Duel(int64_t num_blocks, const Hazards* order, By by, int64_t num_host = 0)
      : by_(by),
        num_host_(num_host),
        one_of_(by == By::kRequest
                    ? 1
                    : (num_blocks + num_host + learned::kSimulated - 1) / learned::kSimulated),
        last_sampled_(static_cast<uint32_t>(UINT32_MAX / one_of_)),
        capacity_(std::max<int64_t>((num_blocks + num_host) / one_of_, 1)),
        lru_(capacity_, nullptr),
        own_(capacity_, order) {
    if (by == By::kRequest) own_.finish_chosen();
  }

  bool follows_lru() const { return follows_lru_; }
  // A request uses and holds a block. `is_hit`: whether the pool had cached it. `counts`:
  // whether the use counts as a hit or miss of a request.
  void use(uint32_t key, bool is_hit, bool counts = true) {
    if (!is_sampled(key)) return;
    const bool by_lru = lru_.hold(key), by_value = own_.hold(key);
    if (!counts || compares_requests()) return;
    count(by_ == By::kBlock ? is_hit : by_value, by_lru, by_value);
  }
  void idle(uint32_t key, const Segments::Segment& segment) {
    if (!is_sampled(key)) return;
    lru_.idle(key, segment);
    own_.idle(key, segment);
  }
  // The policy moves an idle block to another segment.
  void assign(uint32_t key, const Segments::Segment& segment) { own_.assign(key, segment); }
  // The pool is full: it caches `num_keys` blocks with keys, and all its other blocks have none.
  // The simulated pools, which contain only blocks with keys, shrink to this capacity until it
  // grows.
  void set_capacity(int64_t num_keys) {
    for (SimulatedPool* each : {&lru_, &own_}) each->set_capacity((num_keys + num_host_) / one_of_);
  }
  void raise_capacity(int64_t num_keys) {
    if ((num_keys + num_host_) / one_of_ > lru_.capacity()) set_capacity(num_keys);
  }
  bool compares_requests() const { return by_ == By::kRequest; }
  SimulatedCache* lru() { return &lru_; }
  SimulatedCache* own() { return &own_; }
  // `num_hit`: blocks that a request hits; the others: that it would hit in the simulated pools.
  void count(int64_t num_hit, int64_t by_lru, int64_t by_value) {
    num_lru_ += by_lru;
    note_gain(num_hit - by_lru);
    if (follows_lru_) {
      evidence_ = std::max<int64_t>(evidence_ + by_value - by_lru, 0);
      best_ = lead_;
      follows_lru_ = !begins_trial();
      return;
    }
    best_ = std::max(best_, lead_);
    follows_lru_ = left() <= -part(learned::kStake) || best_ - lead_ >= capacity_;
    evidence_ = 0;
    least_ = lead_;
    evicted_ = lru_.num_evicted();
  }
  void remove(uint32_t key) {
    if (!is_sampled(key)) return;
    lru_.remove(key);
    own_.remove(key);
  }
  void clear() {
    lru_.clear();
    own_.clear();
  }
  size_t num_bytes() const { return lru_.num_bytes() + own_.num_bytes(); }

 private:
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }
  // Returning to LRU loses at most C hits, and none after the simulated LRU has evicted the C
  // blocks that it held at the return.
  void note_gain(int64_t gain) {
    if (!follows_lru_) {
      lead_ += gain;
    } else if (by_ != By::kSimulation && lru_.num_evicted() - evicted_ < capacity_) {
      lead_ = std::clamp(lead_ + gain, least_ - capacity_, least_);
    }
  }
  // The lead, and the hits that may be lost in proportion to those of LRU.
  double left() const {
    return static_cast<double>(lead_) + learned::kShare * static_cast<double>(num_lru_);
  }
  bool begins_trial() const {
    const double needed =
        part(learned::kEvidence) +
        std::min(learned::kGain * static_cast<double>(num_lru_), part(4 * learned::kStake));
    return static_cast<double>(evidence_) >= needed && left() >= -part(learned::kStake) / 2;
  }
  double part(double of) const { return std::max(of * static_cast<double>(capacity_), 1.0); }

  By by_;
  int64_t num_host_, one_of_;
  uint32_t last_sampled_;  // keys up to this one are sampled
  int64_t capacity_;
  SimulatedPool lru_, own_;
  bool follows_lru_ = true;
  int64_t num_lru_ = 0;           // hits of LRU
  int64_t lead_ = 0, best_ = 0;   // hits gained over LRU, and most in this trial
  int64_t least_ = 0;             // lead at the end of the last trial
  int64_t evicted_ = -capacity_;  // blocks that the simulated LRU had evicted by then
  int64_t evidence_ = 0;          // hits that the own order gained since it was furthest behind
};

}  // namespace kvcache
