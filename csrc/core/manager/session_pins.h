// SPDX-License-Identifier: Apache-2.0
// The cached blocks that each session has pinned.
//
// Invariant: a pin ends when its block loses its hash, and a session counts only pins that still
// exist.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/hash.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class SessionPins {
 public:
  explicit SessionPins(BlockPool* pool) : pool_(pool) {}

  // Pins the blocks of the pool with these hashes for a session, replacing its earlier pins.
  // Returns the number of pinned blocks.
  int64_t pin(const std::string& session, const Hash* hashes, size_t num_hashes,
              const std::vector<CacheGroup>& groups) {
    std::vector<Pinned> pinned = find_cached(hashes, num_hashes, groups);
    forget_dead_sessions();
    std::vector<Pinned>& of_session = pins_[session];  // created first, because this may throw
    // Pinned first, so that a block in both sets is never unpinned.
    for (const Pinned& each : pinned) pool_->pin(&each.id, 1);
    unpin_all(of_session);
    of_session = std::move(pinned);
    return static_cast<int64_t>(of_session.size());
  }
  // Returns how many blocks of the session were evicted despite their pins; 0 without pins.
  int64_t unpin(const std::string& session) {
    const auto known = pins_.find(session);
    if (known == pins_.end()) return 0;
    const std::vector<Pinned>& pinned = known->second;
    const auto is_dead = [&](const Pinned& each) { return !is_alive(each); };
    const auto num_broken = std::count_if(pinned.begin(), pinned.end(), is_dead);
    unpin_all(pinned);
    pins_.erase(known);
    return num_broken;
  }

  size_t num_sessions() const { return pins_.size(); }

  // Throws std::logic_error if the pool counts fewer pinned blocks than the sessions hold.
  void check_invariants() const {
    std::set<BlockId> alive;
    for (const auto& [session, pinned] : pins_) {
      for (const Pinned& each : pinned) {
        if (is_alive(each)) alive.insert(each.id);
      }
    }
    require(static_cast<int64_t>(alive.size()) <= pool_->num_pinned(),
            "sessions hold pins that the pool does not know");
  }

 private:
  struct Pinned {
    BlockId id;
    uint8_t group, generation;
    Hash hash;
  };
  // Returns the cached blocks of all groups with these hashes of hash blocks. In a group that keeps
  // all tokens, only the blocks before the first missing one.
  std::vector<Pinned> find_cached(const Hash* hashes, size_t num_hashes,
                                  const std::vector<CacheGroup>& groups) const {
    std::vector<Pinned> pinned;
    for (const CacheGroup& group : groups) {
      for (auto i = static_cast<size_t>(group.num_hashes) - 1; i < num_hashes;
           i += static_cast<size_t>(group.num_hashes)) {
        const BlockId id = pool_->find(hashes[i], group.id);
        if (id != kNullBlock) {
          pinned.push_back({id, group.id, pool_->generation(id), hashes[i]});
        } else if (group.keeps_all) {
          break;  // lookups cannot find the blocks after it
        }
      }
    }
    return pinned;
  }
  bool is_alive(const Pinned& pinned) const {
    return pool_->holds(pinned.id, pinned.hash, pinned.group) &&
           pool_->generation(pinned.id) == pinned.generation && pool_->is_pinned(pinned.id);
  }
  void unpin_all(const std::vector<Pinned>& pinned) {
    for (const Pinned& each : pinned) {
      if (is_alive(each)) pool_->unpin(&each.id, 1);
    }
  }
  // Removes sessions without pins, because sessions that are never unpinned would accumulate. Runs
  // only when the number of sessions has doubled, so the cost is amortized.
  void forget_dead_sessions() {
    if (pins_.size() < num_sessions_to_look_through_) return;
    for (auto it = pins_.begin(); it != pins_.end();) {
      const std::vector<Pinned>& pinned = it->second;
      const bool any = std::any_of(pinned.begin(), pinned.end(),
                                   [&](const Pinned& each) { return is_alive(each); });
      it = any ? std::next(it) : pins_.erase(it);
    }
    num_sessions_to_look_through_ = std::max<size_t>(2 * pins_.size(), 64);
  }

  BlockPool* pool_;
  std::unordered_map<std::string, std::vector<Pinned>> pins_;
  size_t num_sessions_to_look_through_ = 64;
};

}  // namespace kvcache
