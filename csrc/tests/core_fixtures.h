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

inline std::vector<Hash> hashes_of(const HashList& list) { return {list.begin(), list.end()}; }

inline CacheGroup group_of(std::shared_ptr<const AttentionKind> kind, int64_t block_size,
                           uint8_t id = 0, int64_t hash_block_size = 0) {
  CacheGroup group{};
  group.rules = &kind->rules();
  group.keeps_all = kind->keeps_all();
  group.num_speculative = kind->num_speculative_blocks();
  group.is_cached = group.rules->traits.has_hits;
  group.is_transferred = true;
  group.kind = std::move(kind);
  group.id = id;
  group.block_size = block_size;
  group.num_hashes = hash_block_size == 0 ? 1 : block_size / hash_block_size;
  group.hit_unit = hash_block_size == 0 ? block_size : hash_block_size;
  group.retained_every = group.hit_unit;
  group.max_blocks = 1000;
  group.num_places = kUnbounded;
  return group;
}

inline std::vector<CacheGroup> full_groups(int64_t block_size) {
  return {group_of(std::make_shared<FullAttention>(), block_size)};
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
