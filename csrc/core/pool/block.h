// SPDX-License-Identifier: Apache-2.0
// One block of a pool.
#pragma once

#include <cstdint>

#include "core/hash.h"
#include "core/secret_key.h"

namespace kvcache {

// The state of a block, except for its free-list links.
struct alignas(16) Block {
  Hash hash;  // valid while the block is indexed
  // Ring of blocks published under the same (hash, group); null: not indexed.
  BlockId older, younger;
  int32_t ref_count;   // > 0: held
  uint8_t group;       // cache group of its content
  uint8_t generation;  // number of allocations, modulo 256
  uint16_t epoch;      // equal to the pool's epoch if the block is cached
};
static_assert(sizeof(Block) == 48, "every byte here is paid once per block");

// Identifies a hash in a group, like `tag_of` a hash.
inline uint64_t key_of(const Hash& hash, uint8_t group) {
  return uint64_t{group} << 56 ^ tag_of(hash);
}
inline uint64_t key_of(const Block& block) { return key_of(block.hash, block.group); }

// Gives a pool's eviction policy access to the hashes of the pool's blocks.
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

 private:
  const Block* blocks_ = nullptr;
  const uint16_t* epoch_ = nullptr;
};

}  // namespace kvcache
