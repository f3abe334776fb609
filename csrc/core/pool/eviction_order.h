// SPDX-License-Identifier: Apache-2.0
// Ranks the blocks that may be evicted, the candidates. The pool decides which blocks these are: a
// block that is held or pinned, or that has a cached child, is not a candidate, and uncached blocks
// are allocated first.
//
// A policy that learns is an order and a listener (block_listener.h) in one class.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hash.h"
#include "core/pool/block.h"

namespace kvcache {

// The times that the caller has set, and the accesses that it has reported.
struct PoolClock {
  int64_t now_ms = 0;
  double access_time = 0;    // largest time of an access
  int64_t num_accesses = 0;  // the number of the last access
};

// What blocks are evicted for.
enum class Taker : uint8_t {
  kOther = 0,      // a swap, or a load by a connector
  kRunning = 1,    // the next tokens of a running request
  kNew = 2,        // a new request without a hit
  kContinued = 3,  // a new request with a hit
};

// What an order can read of its pool.
struct PoolView {
  PublishedBlocks blocks;
  PoolClock clock;
  Taker taker = Taker::kOther;
};

class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;

  // Called when the block becomes a candidate. The block may become one again after a hit, or after
  // its child was evicted or its pin removed, so its rank must not depend on the time of the call.
  virtual void insert(BlockId id) = 0;
  virtual void remove(BlockId id) = 0;  // no longer a candidate
  // Returns the candidate to evict next, without removing it; the null block if there is none.
  virtual BlockId victim() = 0;
  virtual size_t num_bytes() const { return 0; }

  // Called once by the pool, before all other calls.
  void attach(const PoolView* view) { view_ = view; }

 protected:
  const PoolView& view() const { return *view_; }

 private:
  const PoolView* view_ = nullptr;
};

// A cache that a policy simulates, in which the manager looks up requests.
class SimulatedCache {
 public:
  virtual bool has(const Hash& hash, uint8_t group) const = 0;
  // The request that is being admitted would read this window block or state at the end of its hit
  // in the simulated cache.
  virtual void use_end(const Hash& hash, uint8_t group) = 0;

 protected:
  ~SimulatedCache() = default;
};

}  // namespace kvcache
