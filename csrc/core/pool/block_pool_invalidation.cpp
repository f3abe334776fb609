// SPDX-License-Identifier: Apache-2.0
// Removes invalid content, and everything that may have been computed from it, from a pool.
#include <algorithm>

#include "core/pool/block_pool.h"

namespace kvcache {

namespace {

// States of all blocks under a hash.
constexpr BlockId kUntouched = -1;
constexpr BlockId kTouched = kNullBlock;

}  // namespace

void BlockPool::add_chains(const BlockId* ids, int64_t n, InvalidChains* invalid) const {
  for (int64_t i = 0; i < n; ++i) {
    if (!is_cached(at(ids[i], "ids"))) continue;
    invalid->hashes.insert(tag_of(blocks_[ids[i]].hash));
    invalid->roots.insert(lineage_[ids[i]].root);
  }
}

void BlockPool::evict_derived(const InvalidChains& invalid, bool is_uniform) {
  // Traverses all used blocks once per call.
  if (invalid.roots.empty()) return;
  std::vector<BlockId> found;
  // For each hash, one of its blocks until the result is known; afterwards kUntouched or kTouched.
  std::unordered_map<uint64_t, BlockId> by_hash;
  for (BlockId id = 1; id < next_fresh_; ++id) {
    const Block& block = blocks_[id];
    if (!is_cached(block) || invalid.roots.count(lineage_[id].root) == 0) continue;
    found.push_back(id);
    by_hash.emplace(key_of(block), id);
  }
  if (is_uniform) {
    const auto touched = [&](BlockId id) { return !is_untouched(id, invalid.hashes, &by_hash); };
    found.erase(std::stable_partition(found.begin(), found.end(), touched), found.end());
  }
  evict(found.data(), static_cast<int64_t>(found.size()));
}

// Walks up the chain and records the results in `by_hash`, so that each chain is walked once.
bool BlockPool::is_untouched(BlockId id, const std::unordered_set<uint64_t>& invalid,
                             std::unordered_map<uint64_t, BlockId>* by_hash) const {
  std::vector<uint64_t> path;
  BlockId verdict = kTouched;
  for (BlockId up = id;;) {
    const Block& block = blocks_[up];
    if (invalid.count(tag_of(block.hash)) != 0) break;
    path.push_back(key_of(block));
    if (short_tag_of(block.hash) == lineage_[up].root) {
      verdict = kUntouched;
      break;
    }
    const auto parent = by_hash->find(lineage_[up].parent());
    if (parent == by_hash->end()) break;
    if (parent->second <= kNullBlock) {
      verdict = parent->second;
      break;
    }
    up = parent->second;
  }
  for (uint64_t key : path) (*by_hash)[key] = verdict;
  return verdict == kUntouched;
}

}  // namespace kvcache
