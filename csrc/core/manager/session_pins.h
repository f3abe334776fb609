// Which cached blocks a session has pinned.
//
// Invariant: a pin dies with its block's hash; a session counts only what is pinned still.
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

  // Pins what the pool has of the blocks with these hashes; what the session had pinned before is
  // not any more. The number of blocks.
  int64_t pin(const std::string& session, const std::vector<Hash>& hashes,
              const std::vector<CacheGroup>& groups);
  // How many of the session's blocks have been evicted all the same; 0 where it pins nothing.
  int64_t unpin(const std::string& session);

  size_t num_sessions() const { return pins_.size(); }

  // Throws std::logic_error where the pool has fewer pinned blocks than sessions hold.
  void check_invariants() const;

 private:
  struct Pinned {
    BlockId id;
    uint8_t group, generation;
    Hash hash;
  };
  std::vector<Pinned> found(const std::vector<Hash>& hashes,
                            const std::vector<CacheGroup>& groups) const;
  bool is_alive(const Pinned& pinned) const;
  void unpin_all(const std::vector<Pinned>& pinned);
  void forget_dead_sessions();

  BlockPool* pool_;
  std::unordered_map<std::string, std::vector<Pinned>> pins_;
  size_t num_sessions_to_look_through_ = 64;
};

}  // namespace kvcache
