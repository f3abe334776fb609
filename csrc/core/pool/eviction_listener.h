// SPDX-License-Identifier: Apache-2.0
// A listener for cached blocks that are about to be evicted.
#pragma once

#include "core/hash.h"

namespace kvcache {

class EvictionListener {
 public:
  // Called before a block is evicted. The block is still published and is the only one under its
  // hash. Must not change the calling pool.
  virtual void on_eviction(BlockId id) = 0;

 protected:
  ~EvictionListener() = default;
};

}  // namespace kvcache
