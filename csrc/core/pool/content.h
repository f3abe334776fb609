// SPDX-License-Identifier: Apache-2.0
// The content of blocks, with the hashes under which it is published and the data for events.
#pragma once

#include <cstdint>
#include <memory>

#include "core/hash.h"

namespace kvcache {

// The content of a cached block, as passed to another pool.
struct Copied {
  Hash hash;
  uint8_t group;
  uint64_t parent;  // key of the parent (block.h)
  uint32_t root;
  bool is_chain;     // whether the block is found only through its parent
  uint64_t variant;  // see variants.h
  uint32_t adapter = 0;
};

// The content of consecutive blocks of one request: hashes and, if events are recorded, tokens. The
// hash of block i is hashes[i * stride]. The parent hash is the hash of block i - 1, or `parent`
// for i = 0.
struct Content {
  const Hash* hashes;
  const Hash* parent;
  int64_t stride = 1;
  const uint64_t* variants = nullptr;  // one per hash (variants.h); null: all are 0
  const Hash* root = nullptr;          // first hash of the chain; null: each block is a chain
  const int32_t* tokens = nullptr;     // tokens_per_block tokens for each block
  int64_t tokens_per_block = 0;
  int64_t num_lookahead = 0;  // number of tokens after a block that its hash also covers
  int64_t first_token = 0;    // position of the first of `tokens`
  const std::shared_ptr<const void>* labels = nullptr;  // labels for events; null: none
  bool is_chain = true;       // whether a block is useless without its parent
  bool begins_chain = false;  // the first block has no parent
  uint32_t adapter = 0;       // adapter of all blocks (variants.h)

  const Hash& hash(int64_t i) const { return hashes[i * stride]; }
  uint64_t variant(int64_t i) const { return variants == nullptr ? 0 : variants[i * stride]; }
  const Hash& parent_of(int64_t i) const { return i == 0 ? *parent : hashes[(i - 1) * stride]; }
};

}  // namespace kvcache
