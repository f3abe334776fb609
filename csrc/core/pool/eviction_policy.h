// SPDX-License-Identifier: Apache-2.0
// The interface of eviction policies, which choose the next cached block to evict.
//
// The pool enforces the rules common to all policies: a block that is held or pinned, or that has a
// cached child, is not a candidate, and uncached blocks are allocated first. A policy only ranks
// the candidates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash.h"
#include "core/pool/published_blocks.h"
#include "core/pool/simulated_cache.h"

namespace kvcache {

// Retention priority that a caller assigns to tokens [first, stop) of a request.
struct Retention {
  int64_t first, stop;
  int32_t priority;  // 0 to 100; lower priorities are evicted first
  int64_t ttl_ms;    // counted from the release; negative: unlimited
};

// Features of a request segment whose blocks are being released.
struct ReleaseFeatures {
  int64_t num_prefix_tokens = 0;  // hit length at admission
  int64_t num_new_blocks = 0;
  int64_t num_output_tokens = -1;  // -1: the manager counts the tokens appended to the prompt
  int64_t logical_time = 0;        // number of releases so far
  int64_t wall_ms = 0;             // time on the caller's clock
  int64_t tokens_per_block = 1;    // blocks start at multiples of this number
  const Retention* retention = nullptr;
  int64_t num_retention = 0;
  uint32_t tenant = 0;  // derived from the cache salt; 0: none
  // Whether the blocks form a chain. If false, they are window or state blocks of a request whose
  // chains are released next.
  bool is_chain = true;
  bool is_swapped_out = false;  // the request continues later, from copies on the host
};

// A learning policy's classification of a released block.
struct ReleasedAs {
  int64_t segment = 0;     // equal for blocks released together; 0: unknown
  int64_t time = 0;        // release time, on the policy's clock
  float cost = 1;          // cost of recomputing the block, relative to the first block of a chain
  uint16_t num_forks = 0;  // forks observed in its chain
  uint16_t reuse_class = 0;
};

// One access by a request. It is recorded for the request's blocks only when they are released,
// because most requests access their blocks far more often than they release them.
struct Access {
  double now = 0;      // time on the caller's clock
  int64_t number = 0;  // sequence number of the access; 0: no access
};

// A policy is notified only about the blocks of its own pool. Its records of a block are valid
// until the block is forgotten or reallocated.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Called once, before all other calls. The policy may read the hashes of the pool's blocks at any
  // time; a block's hash is available from before `on_publish` until after `on_forget`.
  virtual void attach(const PublishedBlocks&) {}
  // Called at most once, after `attach`, if a hit needs more than a chain of device blocks: states,
  // windows, or the pages of a host to which all evicted blocks are written (`num_host_blocks`; 0:
  // no such host). From then on, the manager reports the hits of each request to `simulated()`,
  // unless it is null.
  virtual void compare_requests(int64_t /*num_host_blocks*/) {}
  virtual SimulatedCache* simulated() { return nullptr; }

  // Called when the block becomes a candidate: it is cached, not held and not pinned, and has no
  // cached child. Called again after a child or pin is removed, so the rank must not depend on the
  // time of the call.
  virtual void insert(BlockId id) = 0;
  virtual void remove(BlockId id) = 0;  // no longer a candidate
  // Returns the next candidate to evict, without removing it, or the null block if there is none.
  virtual BlockId victim() = 0;
  // Whether the pool should evict the least recently released candidate instead of `victim()`. It
  // searches only the oldest free blocks, and evicts `victim()` if none of them is a candidate.
  virtual bool prefers_least_recent() const { return false; }

  // Notifications from which policies learn. Each is sent before the `insert` or after the `remove`
  // that it causes.
  virtual void on_allocate(const BlockId*, int64_t) {}  // blocks were allocated for new content
  // Called when the block becomes cached. `hash` is null while the block is only partially cached.
  // `is_first`: whether no other block is cached under this hash.
  virtual void on_publish(BlockId, const Hash*, uint8_t /*group*/, bool /*is_first*/) {}
  virtual void on_hit(const BlockId*, int64_t) {}  // a request hits these cached blocks
  // These window and state blocks were published because they are likely to be hit by a repeated
  // prompt or by another request with the same prefix. Sent while the blocks are held.
  virtual void on_retain(const BlockId*, int64_t) {}
  // Likely future hits of a request would read these cached window and state blocks, which may be
  // held. `hit_ends`: for each block, the length in tokens of the hit that would read it. Sent
  // before the request releases its blocks.
  virtual void on_release_ends(const BlockId*, const int64_t* /*hit_ends*/, int64_t) {}
  // A request releases these blocks. prefix_tokens[i] counts the tokens up to the end of block i.
  // If a fence defers the release, the blocks become idle later. If a request releases blocks but
  // keeps running (blocks that left the window, were replaced by a copy, or are invalid), only
  // `on_released` is called.
  virtual void on_release(const BlockId*, const int64_t* /*prefix_tokens*/, int64_t,
                          const ReleaseFeatures&) {}
  virtual void on_released(const BlockId*, int64_t) {}  // blocks were released for any reason
  virtual void on_idle(BlockId) {}  // a cached block is no longer held; called in release order
  // Starts a new access. Called only if the policy uses accesses.
  virtual Access begin_access(double /*now*/) { return {}; }
  // Assigns this access to the blocks. Blocks that were reallocated, forgotten or accessed after it
  // are ignored.
  virtual void on_access(const BlockId*, int64_t, const Access&) {}
  // Called when the block is no longer cached. `evicted`: whether it was evicted to free space.
  virtual void on_forget(BlockId, const Hash*, uint8_t /*group*/, bool /*evicted*/) {}
  virtual void set_now(int64_t /*ms*/) {}
  virtual void clear() {}  // no block is cached any more
  // The following functions exchange data between the policies of two tiers. `released_as` returns
  // this policy's classification of a block. `on_copy` passes the classification of a copied block
  // to the policy of the copy's tier, and is called again after each later eviction from the other
  // tier. Copied blocks are cached and held.
  virtual ReleasedAs released_as(BlockId) const { return {}; }
  virtual void on_copy(BlockId, const ReleasedAs&) {}
  virtual void on_load(BlockId) {}  // the copied block is cached in the other tier again
  // Returns the expected number of hits of a copy of a block with this classification, minus the
  // value of the space that the copy would occupy; at least 1 if nothing has been learned yet.
  // `evicts`: the copy would evict a cached block, because no uncached block is left.
  virtual double gain_of_copy(const ReleasedAs&, bool /*evicts*/) { return 1; }
  // Returns the learned reuse statistics for another policy of the same kind, or nothing if there
  // are none. `learn` replaces the statistics; the caller must have checked the number of values.
  virtual std::vector<double> learned() const { return {}; }
  virtual void learn(const std::vector<double>&) {}
  // Whether a learning policy currently evicts in LRU order because it had fewer hits than LRU
  // would have had.
  virtual bool falls_back() const { return false; }
  virtual size_t num_bytes() const { return 0; }
};

}  // namespace kvcache
