// SPDX-License-Identifier: Apache-2.0
// Gives a pool's eviction policy access to the hashes of the pool's blocks.
#pragma once

#include <cstdint>

#include "core/hash.h"
#include "core/pool/block.h"

namespace kvcache {

class PublishedBlocks {
 public:
  PublishedBlocks() = default;
  // Both must outlive this object. `epoch`: the pool's epoch.
  PublishedBlocks(const Block* blocks, const uint16_t* epoch) : blocks_(blocks), epoch_(epoch) {}

  // Returns a block of the pool, or null if it is not published under a hash.
  const Block* find(BlockId id) const {
    const Block& block = blocks_[id];
    return block.epoch == *epoch_ && block.older != kNullBlock ? &block : nullptr;
  }
  void prefetch(BlockId id) const { __builtin_prefetch(&blocks_[id], 1); }

 private:
  const Block* blocks_ = nullptr;
  const uint16_t* epoch_ = nullptr;
};

}  // namespace kvcache
