// SPDX-License-Identifier: Apache-2.0
// One block of a pool.
#pragma once

#include <cstdint>

#include "core/hash.h"

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

}  // namespace kvcache
