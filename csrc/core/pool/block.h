// One block of a pool.
#pragma once

#include <cstdint>

#include "core/hash.h"

namespace kvcache {

// One block, besides its place in a free list.
struct alignas(16) Block {
  Hash hash;               // valid while indexed
  BlockId older, younger;  // ring of blocks published under one (hash, group); null: not indexed
  int32_t ref_count;       // > 0: held
  uint8_t group;           // cache group that its content belongs to
  uint8_t generation;      // how often it was handed out, modulo 256
  uint16_t epoch;          // the pool's: cached; any other: not
};
static_assert(sizeof(Block) == 48, "every byte here is paid once per block");

}  // namespace kvcache
