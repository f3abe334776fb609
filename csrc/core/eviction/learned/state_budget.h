// SPDX-License-Identifier: Apache-2.0
// Limits the space that idle states and window blocks occupy while other blocks need space.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// Lists the idle states and window blocks of each class in the order in which they were last
// listed. If there are more of them than the budget allows, the one with the lowest value is the
// next victim. Within a class, only the first and the last one are compared.
class StateBudget {
 public:
  // `share`: fraction of the blocks that states and window blocks may keep; 1: no limit.
  StateBudget(int64_t num_blocks, double share)
      : most_(static_cast<int64_t>(share * static_cast<double>(num_blocks - 1))),
        is_limited_(share < 1),
        blocks_(static_cast<size_t>(is_limited_ ? num_blocks : 0)) {}

  bool is_limited() const { return is_limited_; }
  // Adds a block that is not listed. This call, `remove` and `set_hit` require a limit.
  void insert(BlockId id, int reuse_class) {
    of(id).listed_as = ++num_inserted_;
    std::deque<Entry>& list = lists_[reuse_class];
    list.push_back({id, num_inserted_});
    ++num_listed_;
    if (++num_entries_ > 2 * num_listed_ + kMostStale) drop_stale();
  }
  void remove(BlockId id) {  // has no effect if the block is not listed
    num_listed_ -= of(id).listed_as != 0;
    of(id).listed_as = 0;
  }
  // Sets the length in tokens of a likely hit that reads the block; 0: none is known.
  void set_hit(BlockId id, int64_t num_tokens) { of(id).num_hit = num_tokens; }
  void clear() {
    blocks_.assign(blocks_.size(), {});
    lists_.clear();
    num_listed_ = num_entries_ = 0;
  }
  // Returns the block with the lowest `worth(id, num_hit)`, where `num_hit` was set by `set_hit`.
  // Returns the null block while the limit is not exceeded.
  template <class Worth>
  BlockId victim(Worth worth) {
    if (!is_limited_ || num_listed_ <= most_) return kNullBlock;
    drop_stale_ends();
    BlockId found = kNullBlock;
    double least = 0;
    for (const auto& [reuse_class, list] : lists_) {
      for (const BlockId id : {list.front().id, list.back().id}) {
        const double worth_of_id = worth(id, of(id).num_hit);
        if (found != kNullBlock && worth_of_id >= least) continue;
        found = id;
        least = worth_of_id;
      }
    }
    return found;
  }
  size_t num_bytes() const {
    return blocks_.size() * sizeof(PerBlock) + static_cast<size_t>(num_entries_) * sizeof(Entry);
  }

 private:
  static constexpr int64_t kMostStale = 64;
  struct Entry {
    BlockId id;
    int64_t number;  // of the insertion
  };
  struct PerBlock {
    int64_t listed_as = 0;  // number of the insertion; 0: not listed
    int64_t num_hit = 0;    // tokens
  };
  PerBlock& of(BlockId id) { return blocks_[static_cast<size_t>(id)]; }
  bool is_stale(const Entry& entry) const {
    return blocks_[static_cast<size_t>(entry.id)].listed_as != entry.number;
  }
  // Drops stale entries at both ends of each list, and lists without any other entries.
  void drop_stale_ends() {
    for (auto at = lists_.begin(); at != lists_.end();) {
      std::deque<Entry>& list = at->second;
      const size_t num_before = list.size();
      while (!list.empty() && is_stale(list.front())) list.pop_front();
      while (!list.empty() && is_stale(list.back())) list.pop_back();
      num_entries_ -= static_cast<int64_t>(num_before - list.size());
      at = list.empty() ? lists_.erase(at) : std::next(at);
    }
  }
  void drop_stale() {
    num_entries_ = 0;
    for (auto& [reuse_class, list] : lists_) {
      std::deque<Entry> kept;
      for (const Entry& entry : list) {
        if (!is_stale(entry)) kept.push_back(entry);
      }
      list.swap(kept);
      num_entries_ += static_cast<int64_t>(list.size());
    }
  }

  int64_t most_;
  bool is_limited_;
  std::vector<PerBlock> blocks_;
  std::map<int, std::deque<Entry>> lists_;  // by class; some entries are stale
  int64_t num_entries_ = 0, num_listed_ = 0, num_inserted_ = 0;
};

}  // namespace kvcache
