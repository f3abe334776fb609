// SPDX-License-Identifier: Apache-2.0
// The cached blocks that each session has pinned.
//
// Invariant: a pin ends when its block loses its hash, and a session counts only pins that still
// exist.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

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
              const std::vector<CacheGroup>& groups);
  // Returns how many blocks of the session were evicted despite their pins; 0 without pins.
  int64_t unpin(const std::string& session);

  size_t num_sessions() const { return pins_.size(); }

  // Throws std::logic_error if the pool counts fewer pinned blocks than the sessions hold.
  void check_invariants() const;

 private:
  struct Pinned {
    BlockId id;
    uint8_t group, generation;
    Hash hash;
  };
  std::vector<Pinned> found(const Hash* hashes, size_t num_hashes,
                            const std::vector<CacheGroup>& groups) const;
  bool is_alive(const Pinned& pinned) const;
  void unpin_all(const std::vector<Pinned>& pinned);
  void forget_dead_sessions();

  BlockPool* pool_;
  std::unordered_map<std::string, std::vector<Pinned>> pins_;
  size_t num_sessions_to_look_through_ = 64;
};

}  // namespace kvcache
