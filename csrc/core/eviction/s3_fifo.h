// SPDX-License-Identifier: Apache-2.0
// S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO queues are all you need for cache eviction, SOSP
// 2023): most blocks are never hit, and a small queue evicts them early.
//
// A published block enters the small queue, or the main queue if its hash is a ghost. Ghosts are
// the last `num_blocks` hashes that left the small queue. Hits are counted up to 3. While the small
// queue has reached its share of the pool, its oldest candidate is evicted, or moved to the main
// queue if it was hit at least twice. Otherwise, the oldest candidate of the main queue is evicted,
// or reinserted with its hit count reduced by one if it was hit. If the chosen queue has no
// candidate, the other queue is used. Blocks that are held or have cached children keep their
// places.
#pragma once

#include <algorithm>
#include <list>
#include <unordered_map>

#include "core/eviction/eviction_policy.h"
#include "core/eviction/ranked.h"
#include "core/secret_key.h"
#include "core/zeroed_array.h"

namespace kvcache {

// The last hashes that left the small queue, without duplicates.
class Ghosts {
 public:
  explicit Ghosts(size_t most) : most_(most) {}
  void add(uint64_t key) {
    take(key);
    order_.push_back(key);
    where_.emplace(key, std::prev(order_.end()));
    if (order_.size() > most_) take(order_.front());
  }
  bool take(uint64_t key) {  // returns whether the key was present
    const auto found = where_.find(key);
    if (found == where_.end()) return false;
    order_.erase(found->second);
    where_.erase(found);
    return true;
  }
  void clear() {
    order_.clear();
    where_.clear();
  }
  size_t num_bytes() const {
    // Size of a list node and a map node.
    constexpr size_t kEntryBytes = 3 * sizeof(void*) + 4 * sizeof(void*);
    return order_.size() * kEntryBytes + where_.bucket_count() * sizeof(void*);
  }

 private:
  size_t most_;
  std::list<uint64_t> order_;  // oldest first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where_;
};

class S3Fifo : public EvictionPolicy {
 public:
  S3Fifo(int64_t num_blocks, double small_share)
      : small_size_(static_cast<int64_t>(small_share * static_cast<double>(num_blocks - 1))),
        states_(static_cast<size_t>(num_blocks)),
        small_(num_blocks),
        main_(num_blocks),
        ghosts_(static_cast<size_t>(num_blocks)) {}

  void insert(BlockId id) override {
    (states_[id].queue == kSmall ? small_ : main_).set(id, states_[id].place);
  }
  void remove(BlockId id) override {
    small_.erase(id);
    main_.erase(id);
  }
  BlockId victim() override {
    for (;;) {
      const bool takes_small =
          small_.size() > 0 && (num_small_ >= small_size_ || main_.size() == 0);
      const BlockId id = takes_small ? small_.top() : main_.top();
      if (id == kNullBlock) return id;
      State& state = states_[id];
      if (state.num_hits < (takes_small ? 2 : 1)) return id;
      state.num_hits = static_cast<uint8_t>(takes_small ? 0 : state.num_hits - 1);
      remove(id);
      enter(id, kMain);
      insert(id);
    }
  }

  void on_publish(BlockId id, const Hash* hash, uint8_t group, bool) override {
    states_[id].num_hits = 0;
    enter(id, hash != nullptr && ghosts_.take(SecretKey::of_process().fold(*hash, group)) ? kMain
                                                                                          : kSmall);
  }
  void on_hit(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      uint8_t& num_hits = states_[ids[i]].num_hits;
      num_hits = std::min<uint8_t>(num_hits + 1, 3);
    }
  }
  void on_forget(BlockId id, const Hash* hash, uint8_t group, bool evicted) override {
    if (evicted && hash != nullptr && states_[id].queue == kSmall) {
      ghosts_.add(SecretKey::of_process().fold(*hash, group));
    }
    enter(id, kNone);
  }
  void clear() override {
    states_.zero();
    small_.clear();
    main_.clear();
    ghosts_.clear();
    num_small_ = 0;
  }
  size_t num_bytes() const override {
    return sizeof(*this) + states_.num_bytes() + small_.num_bytes() + main_.num_bytes() +
           ghosts_.num_bytes();
  }

 private:
  enum Queue : uint8_t { kNone, kSmall, kMain };
  struct State {
    int64_t place;
    Queue queue;
    uint8_t num_hits;
  };
  void enter(BlockId id, Queue queue) {  // adds the block as the youngest
    num_small_ += (queue == kSmall) - (states_[id].queue == kSmall);
    states_[id].queue = queue;
    states_[id].place = ++num_entered_;
  }

  int64_t small_size_;
  ZeroedArray<State> states_;
  Ranked<int64_t> small_, main_;  // candidates, oldest first
  Ghosts ghosts_;
  int64_t num_small_ = 0;  // cached blocks in the small queue
  int64_t num_entered_ = 0;
};

}  // namespace kvcache
