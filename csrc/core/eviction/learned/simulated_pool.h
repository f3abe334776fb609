// SPDX-License-Identifier: Apache-2.0
// The blocks that a pool with a certain order of eviction would cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/keyed_array.h"
#include "core/eviction/learned/segments.h"
#include "core/hash.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// Holds the keys of blocks only. Blocks that requests hold are not evicted.
class SimulatedPool final : public SimulatedCache {
 public:
  SimulatedPool(int64_t capacity, const Hazards* order)  // null: LRU
      : most_(capacity + capacity / 4 + 64),
        full_(capacity),
        capacity_(capacity),
        order_(order),
        segments_(most_ + 1),
        nodes_(most_) {}

  // Marks a block as held. Returns whether it was cached.
  bool hold(uint32_t key) {
    const auto i = static_cast<BlockId>(nodes_.find(key));
    if (i == kNullBlock) {
      add(key);
      return false;
    }
    if (segments_.is_candidate(i)) segments_.remove(i);
    return true;
  }
  // Assigns a block that is no longer held.
  void idle(uint32_t key, const Segments::Segment& like) {
    auto i = static_cast<BlockId>(nodes_.find(key));
    if (i == kNullBlock) i = add(key);
    if (i == kNullBlock) return;
    place(i, like.number, like.time, like.reuse_class);
    now_ = std::max(now_, like.time);
    shrink();
  }
  // Moves a block that is not held to another segment.
  void assign(uint32_t key, const Segments::Segment& like) {
    const auto i = static_cast<BlockId>(nodes_.find(key));
    if (segments_.is_candidate(i)) place(i, like.number, like.time, like.reuse_class);
  }
  bool has(const Hash& hash, uint8_t group) const override {
    return nodes_.find(Hazards::key_of(hash, group)) != 0;
  }
  void use_end(const Hash& hash, uint8_t group) override {
    const auto i = static_cast<BlockId>(nodes_.find(Hazards::key_of(hash, group)));
    if (segments_.is_candidate(i)) place(i, 0, now_, ReuseClass::kHit);
  }
  void finish_chosen() { segments_.finish_chosen(); }
  int64_t capacity() const { return capacity_; }
  void set_capacity(int64_t capacity) { capacity_ = std::min(capacity, full_); }
  void remove(uint32_t key) {
    if (const uint32_t i = nodes_.find(key)) remove_node(static_cast<BlockId>(i));
  }
  void clear() {
    segments_.clear();
    nodes_.clear();
    unused_.clear();
    num_nodes_ = 0;
  }
  int64_t num_evicted() const { return num_evicted_; }
  size_t num_bytes() const {
    return segments_.num_bytes() + nodes_.num_bytes() + unused_.capacity() * sizeof(BlockId);
  }

 private:
  struct Node {
    uint32_t key, next;
  };

  int64_t num_present() const { return num_nodes_ - static_cast<int64_t>(unused_.size()); }
  void place(BlockId i, uint32_t number, int64_t time, int reuse_class) {
    if (segments_.is_candidate(i)) segments_.remove(i);
    segments_.assign_like(i, number, time, order_ == nullptr ? 0 : reuse_class);
    segments_.insert(i);
  }
  BlockId add(uint32_t key) {  // the null block if there are too many
    if (num_present() == most_) return kNullBlock;
    BlockId i = num_nodes_ + 1;
    if (unused_.empty()) {
      ++num_nodes_;
    } else {
      i = unused_.back();
      unused_.pop_back();
    }
    nodes_.link(static_cast<uint32_t>(i), {key, 0});
    shrink();
    return i;
  }
  void remove_node(BlockId i) {
    if (segments_.is_candidate(i)) segments_.remove(i);
    segments_.assign(i, Segments::kNone);
    nodes_.unlink(static_cast<uint32_t>(i));
    unused_.push_back(i);
  }
  void shrink() {
    while (num_present() > capacity_) {
      const BlockId i = segments_.victim(order_, now_);
      if (i == kNullBlock) return;
      remove_node(i);
      ++num_evicted_;
    }
  }

  int64_t most_;             // keys, including held ones
  int64_t full_, capacity_;  // keys without held ones: at first, and now
  const Hazards* order_;
  Segments segments_;
  KeyedArray<Node> nodes_;
  BlockId num_nodes_ = 0;
  std::vector<BlockId> unused_;  // nodes
  int64_t now_ = 0, num_evicted_ = 0;
};

}  // namespace kvcache
