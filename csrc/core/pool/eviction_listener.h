// Hears of each cached block that is about to be taken for other content.
#pragma once

#include "core/hash.h"

namespace kvcache {

class EvictionListener {
 public:
  // The block is still found under its hash, and is the only one under it. Must not change the
  // pool that calls.
  virtual void on_eviction(BlockId id) = 0;

 protected:
  ~EvictionListener() = default;
};

}  // namespace kvcache
