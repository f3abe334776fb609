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
#include "core/pool/block_listener.h"
#include "core/pool/block_pool.h"
#include "core/pool/eviction_order.h"
#include "core/pool/simulated_cache.h"

namespace kvcache {

// A policy is notified only about the blocks of its own pool. Its records of a block are valid
// until the block is forgotten or reallocated.
class EvictionPolicy : public EvictionOrder, public BlockListener {
 public:
  // Called once, before all other calls. The policy may read the hashes of the pool's blocks at any
  // time; a block's hash is available from before `on_publish` until after `on_forget`.
  // Called at most once, after `attach`, if a hit needs more than a chain of device blocks: states,
  // windows, or the pages of a host to which all evicted blocks are written (`num_host_blocks`; 0:
  // no such host). From then on, the manager reports the hits of each request to `simulated()`,
  // unless it is null.
  virtual void compare_requests(int64_t /*num_host_blocks*/) {}
  virtual SimulatedCache* simulated() { return nullptr; }

  BlockId victim() final {
    sync();
    return choose();
  }
  void on_publish(const Published& batch) final {
    sync();
    for (int64_t i = 0; i < batch.n; ++i) {
      if (!batch.is_again) {
        on_publish(batch.ids[i], batch.hash(i), batch.group, batch.is_first[i] != 0);
      }
      if (batch.copied != nullptr) on_copy(batch.ids[i], batch.copied->released_as);
    }
  }
  void on_hit(const Hit& batch) final {
    sync();
    if (batch.by == Hit::By::kRequest) on_hit(batch.ids, batch.n);
    if (batch.by == Hit::By::kExpected) on_retain(batch.ids, batch.n);
    for (int64_t i = 0; batch.by == Hit::By::kOtherTier && i < batch.n; ++i) on_load(batch.ids[i]);
  }
  void on_release(const Released& batch) final {
    sync();
    if (batch.hit_ends != nullptr) {
      on_release_ends(batch.ids, batch.hit_ends, batch.n);
    } else if (batch.features != nullptr) {
      on_release(batch.ids, batch.prefix_tokens, batch.n, *batch.features);
    }
  }
  void on_idle(const Blocks& batch) final {
    sync();
    for (const BlockId id : batch) on_idle(id);
  }
  void on_forget(const Forgotten& batch) final {
    sync();
    if (batch.why == Forgotten::Why::kReset) return clear();
    for (int64_t i = 0; batch.why != Forgotten::Why::kFreed && i < batch.n; ++i) {
      on_forget(batch.ids[i], batch.hash(i), batch.group(i), batch.why == Forgotten::Why::kEvicted);
    }
  }
  virtual BlockId choose() = 0;

  // Notifications from which policies learn. Each is sent before the `insert` or after the `remove`
  // that it causes.
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
  virtual void on_idle(BlockId) {}  // a cached block is no longer held; called in release order
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

 private:
  void sync() {
    if (view().clock.now_ms != now_ms_) set_now(now_ms_ = view().clock.now_ms);
  }
  int64_t now_ms_ = 0;
};

// The cache that the pool's policy simulates; null: none.
inline SimulatedCache* simulated_in(BlockPool* pool) {
  auto* policy = dynamic_cast<EvictionPolicy*>(pool->order());
  return policy == nullptr ? nullptr : policy->simulated();
}

}  // namespace kvcache
