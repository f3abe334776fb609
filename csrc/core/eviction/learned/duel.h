// SPDX-License-Identifier: Apache-2.0
// Decides whether a policy follows LRU or its own order, by simulating both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/eviction/learned/constants.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/segments.h"
#include "core/hash.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// The keys of the blocks that a pool would cache. Blocks that requests hold are not evicted.
class SimulatedPool final : public SimulatedCache {
 public:
  SimulatedPool(int64_t capacity, const Hazards* order)  // null: LRU
      : most_(capacity + capacity / 4 + 64),
        full_(capacity),
        capacity_(capacity),
        order_(order),
        segments_(most_ + 1),
        nodes_(1) {
    size_t num_heads = 1;
    while (2 * num_heads < static_cast<size_t>(capacity)) num_heads *= 2;
    heads_.assign(num_heads, 0);
  }

  // Marks a block as held. Returns whether it was cached.
  bool hold(uint32_t key) {
    const BlockId i = find(key);
    if (i != kNullBlock) {
      if (segments_.is_candidate(i)) segments_.remove(i);
      return true;
    }
    if (num_present_ < most_) add(key);
    return false;
  }
  // Assigns a block that is no longer held, of a segment with this number, class and time.
  void idle(uint32_t key, uint32_t number, int reuse_class, int64_t time) {
    BlockId i = find(key);
    if (i == kNullBlock) {
      if (num_present_ == most_) return;
      i = add(key);
    }
    place(i, number, reuse_class, time);
    now_ = std::max(now_, time);
    shrink();
  }
  // Moves a block that is not held to another segment.
  void assign(uint32_t key, uint32_t number, int reuse_class, int64_t time) {
    const BlockId i = find(key);
    if (i != kNullBlock && segments_.is_candidate(i)) place(i, number, reuse_class, time);
  }
  void finish_chosen() { segments_.finish_chosen(); }
  bool has(const Hash& hash, uint8_t group) const override {
    return find(Hazards::key_of(hash, group)) != kNullBlock;
  }
  void use_end(const Hash& hash, uint8_t group) override {
    const uint32_t key = Hazards::key_of(hash, group);
    const int before = segments_.segment_of(find(key)).reuse_class;
    assign(key, 0, ReuseClass::hit(before), now_);
  }
  int64_t capacity() const { return capacity_; }
  void set_capacity(int64_t capacity) { capacity_ = std::min(capacity, full_); }
  void remove(uint32_t key) {
    if (const BlockId i = find(key); i != kNullBlock) remove_node(i);
  }
  void clear() {
    segments_.clear();
    nodes_.assign(1, {});
    heads_.assign(heads_.size(), kNullBlock);
    unused_ = kNullBlock;
    num_present_ = 0;
    open_ = Segments::kNone;
  }
  int64_t num_evicted() const { return num_evicted_; }
  size_t num_bytes() const {
    return segments_.num_bytes() + nodes_.capacity() * sizeof(Node) +
           heads_.capacity() * sizeof(BlockId);
  }

 private:
  struct Node {
    uint32_t key;
    BlockId next;  // with the same head; also links unused nodes
  };

  void place(BlockId i, uint32_t number, int reuse_class, int64_t time) {
    if (segments_.is_candidate(i)) segments_.remove(i);
    if (order_ == nullptr) reuse_class = 0;
    if (open_ == Segments::kNone || number != number_ || segments_[open_].time != time ||
        segments_[open_].reuse_class != reuse_class) {
      open_ = segments_.open(time, reuse_class);
      number_ = number;
    }
    segments_.assign(i, open_);
    segments_.insert(i);
  }
  size_t head_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }
  BlockId find(uint32_t key) const {
    BlockId i = heads_[head_of(key)];
    while (i != kNullBlock && nodes_[i].key != key) i = nodes_[i].next;
    return i;
  }
  BlockId add(uint32_t key) {
    BlockId i = unused_;
    if (i == kNullBlock) {
      i = static_cast<BlockId>(nodes_.size());
      nodes_.emplace_back();
    }
    unused_ = nodes_[i].next;
    BlockId& head = heads_[head_of(key)];
    nodes_[i] = {key, head};
    head = i;
    ++num_present_;
    shrink();
    return i;
  }
  void remove_node(BlockId i) {
    if (segments_.is_candidate(i)) segments_.remove(i);
    if (segments_.segment_of(i).num_blocks == 1 && segments_.of(i) == open_)
      open_ = Segments::kNone;
    segments_.assign(i, Segments::kNone);
    BlockId* at = &heads_[head_of(nodes_[i].key)];
    while (*at != i) at = &nodes_[*at].next;
    *at = nodes_[i].next;
    nodes_[i].next = unused_;
    unused_ = i;
    --num_present_;
  }
  void shrink() {
    while (num_present_ > capacity_) {
      const uint32_t s = segments_.choose(order_, now_);
      if (s == Segments::kNone) return;
      remove_node(segments_[s].first);
      ++num_evicted_;
    }
  }

  int64_t most_;             // keys, including held ones
  int64_t full_, capacity_;  // keys without held ones: at first, and now
  const Hazards* order_;
  Segments segments_;
  std::vector<Node> nodes_;  // node 0: none
  std::vector<BlockId> heads_;
  BlockId unused_ = kNullBlock;
  int64_t num_present_ = 0, now_ = 0, num_evicted_ = 0;
  uint32_t open_ = Segments::kNone, number_ = 0;
};

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
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }
  // A request uses and holds a sampled block. `is_hit`: whether the pool had cached it. `counts`:
  // whether the use counts as a hit or miss of a request.
  void use(uint32_t key, bool is_hit, bool counts = true) {
    const bool by_lru = lru_.hold(key), by_value = own_.hold(key);
    if (!counts || compares_requests()) return;
    count(by_ == By::kBlock ? is_hit : by_value, by_lru, by_value);
  }
  void idle(uint32_t key, const Segments::Segment& segment) {
    lru_.idle(key, segment.number, segment.reuse_class, segment.time);
    own_.idle(key, segment.number, segment.reuse_class, segment.time);
  }
  // The policy moves an idle block to another segment.
  void assign(uint32_t key, const Segments::Segment& segment) {
    own_.assign(key, segment.number, segment.reuse_class, segment.time);
  }
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
    // Returning to LRU loses at most C hits, and none after the simulated LRU has evicted the C
    // blocks that it held at the return.
    if (!follows_lru_) {
      lead_ += num_hit - by_lru;
    } else if (by_ != By::kSimulation && lru_.num_evicted() - evicted_ < capacity_) {
      lead_ = std::clamp(lead_ + num_hit - by_lru, least_ - capacity_, least_);
    }
    const double left =
        static_cast<double>(lead_) + learned::kShare * static_cast<double>(num_lru_);
    if (follows_lru_) {
      evidence_ = std::max<int64_t>(evidence_ + by_value - by_lru, 0);
      const double needed =
          part(learned::kEvidence) +
          std::min(learned::kGain * static_cast<double>(num_lru_), part(4 * learned::kStake));
      follows_lru_ = static_cast<double>(evidence_) < needed || left < -part(learned::kStake) / 2;
      best_ = lead_;
      return;
    }
    best_ = std::max(best_, lead_);
    follows_lru_ = left <= -part(learned::kStake) || best_ - lead_ >= capacity_;
    evidence_ = 0;
    least_ = lead_;
    evicted_ = lru_.num_evicted();
  }
  void remove(uint32_t key) {
    lru_.remove(key);
    own_.remove(key);
  }
  void clear() {
    lru_.clear();
    own_.clear();
  }
  size_t num_bytes() const { return lru_.num_bytes() + own_.num_bytes(); }

 private:
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
