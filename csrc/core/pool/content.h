// The content of blocks: the hashes that it is published under, and what events say of it.
#pragma once

#include <cstdint>
#include <memory>

#include "core/eviction/eviction_policy.h"
#include "core/hash.h"

namespace kvcache {

// The content of a cached block, for another pool.
struct Copied {
  Hash hash;
  uint8_t group;
  uint64_t parent;  // tags
  uint32_t root;
  bool is_chain;  // nothing finds it without its parent
  ReleasedAs released_as;
  uint64_t variant;  // variants.h
};

// The content of some blocks of one request: hashes and, where events are recorded, tokens. Hash i
// is hashes[i * stride]; its parent is that of i - 1, `parent` for the first.
struct Content {
  const Hash* hashes;
  const Hash* parent;
  int64_t stride = 1;
  const uint64_t* variants = nullptr;  // beside the hashes (variants.h); null: all are 0
  const Hash* root = nullptr;          // first hash of the chain; null: each block is a chain
  const int32_t* tokens = nullptr;     // of the first block; tokens_per_block for each
  int64_t tokens_per_block = 0;
  int64_t first_token = 0;                              // position of the first of `tokens`
  const std::shared_ptr<const void>* labels = nullptr;  // for events; null: none
  bool is_chain = true;         // whether a block is of no use without its parent
  bool begins_chain = false;    // the first one has no parent
  BlockId before = kNullBlock;  // most likely the first one's parent; the null block: not known

  const Hash& hash(int64_t i) const { return hashes[i * stride]; }
  uint64_t variant(int64_t i) const { return variants == nullptr ? 0 : variants[i * stride]; }
  const Hash& parent_of(int64_t i) const { return i == 0 ? *parent : hashes[(i - 1) * stride]; }
};

}  // namespace kvcache
