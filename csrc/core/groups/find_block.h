// SPDX-License-Identifier: Apache-2.0
// Finds the cached blocks of a request.
#pragma once

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// Returns the oldest cached block of the group with the content of this whole block of the request,
// or null. Its hash must be known.
inline BlockId find_block(const BlockPool& pool, const TokenChain& chain, const CacheGroup& group,
                          int64_t block) {
  const int64_t hash = group.hash_index(block);
  return pool.find(chain.known_hash(hash), group.id, chain.variant(hash));
}

}  // namespace kvcache
