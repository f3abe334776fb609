// SPDX-License-Identifier: Apache-2.0
#pragma once
// Helpers for tests of the core's components: numbered hashes, groups and cached blocks.

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/kinds.h"
#include "core/groups/rules/page_rules.h"
#include "core/hashing/token_chain.h"
#include "core/pool/block_pool.h"

namespace kvcache::test {

inline Hash hash_of(uint32_t i) {
  Hash hash{};
  std::memcpy(hash.bytes, &i, sizeof(i));
  return hash;
}

// Returns hash_of(first), hash_of(first + 1), ...
inline std::vector<Hash> hashes_from(uint32_t first, size_t n) {
  std::vector<Hash> hashes;
  for (size_t i = 0; i < n; ++i) hashes.push_back(hash_of(first + static_cast<uint32_t>(i)));
  return hashes;
}

// One group of full attention.
inline std::vector<CacheGroup> full_groups(int64_t block_size) {
  const auto kind = std::make_shared<FullAttention>();
  CacheGroup group{};
  group.rules = &kind->rules();
  group.keeps_all = kind->keeps_all();
  group.is_cached = group.is_transferred = true;
  group.kind = kind;
  group.block_size = group.hit_unit = group.retained_every = block_size;
  group.num_hashes = 1;
  group.max_blocks = 1000;
  group.num_places = kUnbounded;
  return {group};
}

// `take` allocates blocks. `publish_chain` publishes blocks as a chain with these hashes.
inline std::vector<BlockId> take(BlockPool* pool, int64_t n) {
  std::vector<BlockId> ids(static_cast<size_t>(n));
  pool->allocate(n, ids.data());
  return ids;
}

inline void publish_chain(BlockPool* pool, const std::vector<BlockId>& ids,
                          const std::vector<Hash>& hashes, uint8_t group = 0) {
  const Hash no_parent{};
  Content content{hashes.data(), &no_parent};
  content.root = hashes.data();
  pool->publish(ids.data(), content, static_cast<int64_t>(ids.size()), group);
}

inline void release(BlockPool* pool, const std::vector<BlockId>& ids) {
  pool->release(ids.data(), static_cast<int64_t>(ids.size()));
}

}  // namespace kvcache::test
