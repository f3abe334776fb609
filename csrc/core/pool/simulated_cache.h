// SPDX-License-Identifier: Apache-2.0
// A cache that an eviction policy simulates, to compare its own hits with those of another policy.
#pragma once

#include <cstdint>

#include "core/hash.h"

namespace kvcache {

class SimulatedCache {
 public:
  // Whether the cache contains this block on the device or, with `on_host`, on the host.
  virtual bool has(const Hash& hash, uint8_t group, bool on_host) const = 0;
  virtual bool has_host() const = 0;  // whether the host is simulated
  virtual void clear_host() = 0;      // the host caches nothing
  // The request that is being admitted would read this window block or state at the end of its hit
  // in the simulated cache, or would recompute it.
  virtual void use_end(const Hash& hash, uint8_t group) = 0;
  // A request of `num_blocks` blocks of full attention was admitted. It hits `num_hit` of them, and
  // would hit `num_simulated` of them in the simulated cache.
  virtual void note_admission(int64_t num_blocks, int64_t num_hit, int64_t num_simulated) = 0;

  // The simulated cache with which the manager compares each request next; null: none.
  virtual SimulatedCache* next() { return nullptr; }

 protected:
  ~SimulatedCache() = default;
};

}  // namespace kvcache
