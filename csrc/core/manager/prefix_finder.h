// SPDX-License-Identifier: Apache-2.0
// Finds the longest prefix that all cache groups of a manager can take from the cache, on the
// device or on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/hit_ends.h"
#include "core/groups/rules/page_rules.h"
#include "core/hashing/token_chain.h"
#include "core/manager/options.h"
#include "core/pool/block_pool.h"
#include "core/pool/simulated_cache.h"

namespace kvcache {

struct PrefixHit {
  struct HostBlock {  // a block of the hit that is on the host
    int64_t column;   // index of the block in the sequence
    BlockId page;
  };
  int64_t num_tokens = 0;
  // The hit length in the groups that keep all tokens, regardless of windows and states. Without
  // such groups, the hit length in all groups except states; 0 if there are only states.
  int64_t num_shared_tokens = 0;
  // Per group: whole blocks; null if the block is no longer read, or is on the host.
  std::vector<std::vector<BlockId>> blocks;
  std::vector<std::vector<HostBlock>> on_host;  // per group, in column order
  int64_t num_host_blocks = 0;
  // Per group: the block whose first num_tokens % block_size tokens are copied, or null.
  std::vector<BlockId> sources;

  // Creates a hit from whole blocks that the caller has looked up on the device.
  static PrefixHit of_device(int64_t num_tokens, const std::vector<std::vector<BlockId>>& blocks);

  // Returns the first token of the hit whose block is on the host, or num_tokens if there is none.
  int64_t first_host_token(const std::vector<CacheGroup>& groups) const;

  // Returns the blocks of the group, followed by the block to copy, if any.
  std::vector<BlockId> ids(const CacheGroup& group) const {
    std::vector<BlockId> out = blocks[group.id];
    if (has_part_of(group)) out.push_back(sources[group.id]);
    return out;
  }
  // Whether the hit ends inside a block of the group. If that block is not read, its source is
  // null.
  bool has_part_of(const CacheGroup& group) const {
    return num_tokens % group.block_size != 0 && group.rules->traits.has_hits;
  }

  bool ends_inside(const std::vector<CacheGroup>& groups) const {
    return std::any_of(groups.begin(), groups.end(),
                       [this](const CacheGroup& group) { return has_part_of(group); });
  }
  // Whether these are the `ids` of each group.
  bool has_ids(const std::vector<CacheGroup>& groups,
               const std::vector<std::vector<BlockId>>& wanted) const {
    return std::all_of(groups.begin(), groups.end(),
                       [&](const CacheGroup& group) { return ids(group) == wanted[group.id]; });
  }
  bool copies_partial() const {
    return std::any_of(sources.begin(), sources.end(),
                       [](BlockId source) { return source != kNullBlock; });
  }
};

class PrefixFinder {
 public:
  struct Context {
    const BlockPool* pool;
    const BlockPool* host;  // null without a host tier
    const std::vector<CacheGroup>* groups;
    const HitEnds* ends;
    int64_t hash_block_size;
  };
  // A drafter needs the hidden states of the tokens before the computed ones, so the last block
  // that its group finds is recomputed. The group must therefore find one more block than the hit,
  // even if this block ends after the last token that a hit may include. If hits can end inside
  // blocks, one more hash block is enough.
  PrefixFinder(const Context& context, const ManagerOptions& options);

  // Returns the hit of a request, which excludes at least the last token. The result is valid until
  // the next call. The hit is empty if caching is disabled or the request does not read the cache.
  // Does not change the pools. The hashes of the chain must be known. Partial blocks are found only
  // on the device.
  const PrefixHit& find(const TokenChain& chain, bool with_partial, bool with_host) {
    return find(chain, with_partial, with_host, chain.read_cache());
  }
  // `reads` overrides the chain's setting. The hit has at most `most_tokens` tokens.
  const PrefixHit& find(const TokenChain& chain, bool with_partial, bool with_host, bool reads,
                        int64_t most_tokens = kUnbounded);

  // Returns the number of blocks that an admitted request would hit in a simulated cache, which is
  // notified of the uses at the end of the hit. Only whole blocks count, in the first cached group
  // that keeps all tokens or, without one, in the first cached group. Does not change the last hit.
  int64_t find_in(SimulatedCache* cache, const TokenChain& chain);
  int64_t compared_unit() const { return compared_unit_; }  // the size of these blocks

 private:
  // Starts a search for whole or partial blocks of this chain, or for none unless `reads`.
  void begin(const TokenChain& chain, bool reads, bool with_partial, bool with_host);
  // The lengths of the hit in the groups that limit the shared prefix, and in all groups.
  struct Lengths {
    int64_t shared, all;
  };
  Lengths search(int64_t num_tokens, int64_t most_tokens = kUnbounded);
  int64_t accepted_by_all(int64_t num_tokens, bool only_shared);
  int64_t accepted(const CacheGroup& group, int64_t num_tokens) {
    if (!group.is_cached) return num_tokens;
    return group.keeps_all ? accepted_by_prefix(group, num_tokens)
                           : accepted_by_window(group, num_tokens);
  }
  int64_t accepted_by_prefix(const CacheGroup& group, int64_t num_tokens);
  int64_t accepted_by_window(const CacheGroup& group, int64_t num_tokens);
  // The hash of the first num_tokens tokens.
  const Hash& hash_at(int64_t num_tokens) const {
    return chain_->known_hash(num_tokens / hash_block_size_ - 1);
  }
  uint64_t variant_at(int64_t num_tokens) const {
    return chain_->variant(num_tokens / hash_block_size_ - 1);
  }
  // Whether the group finds a block that contains the last of num_tokens tokens and is filled up to
  // that token.
  bool is_end_found(const CacheGroup& group, int64_t num_tokens) const {
    return num_tokens % group.block_size == 0 ? is_found(group, num_tokens / group.block_size - 1)
                                              : partial_block_of(group, num_tokens) != kNullBlock;
  }
  BlockId device_block(const CacheGroup& group, int64_t block) const {
    const int64_t end = (block + 1) * group.block_size;
    return pool_->find(hash_at(end), group.id, variant_at(end));
  }
  BlockId host_page(const CacheGroup& group, int64_t block) const {
    if (!with_host_) return kNullBlock;
    const int64_t end = (block + 1) * group.block_size;
    return host_->find(hash_at(end), group.id, variant_at(end));
  }
  bool is_found(const CacheGroup& group, int64_t block) const {
    if (simulated_ != nullptr) {
      return simulated_->has(hash_at((block + 1) * group.block_size), group.id);
    }
    return device_block(group, block) != kNullBlock || host_page(group, block) != kNullBlock;
  }
  int64_t find_leading(const CacheGroup& group, int64_t num_blocks);
  int64_t find_run(const BlockPool& pool, const CacheGroup& group, int64_t first);
  BlockId partial_block_of(const CacheGroup& group, int64_t num_tokens) const {
    return pool_->find_partial(hash_at(num_tokens), group.id, variant_at(num_tokens));
  }
  void collect(const CacheGroup& group);

  const BlockPool* pool_;
  const BlockPool* host_;
  const std::vector<CacheGroup>* groups_;
  const HitEnds* ends_;
  int64_t hash_block_size_;
  bool is_enabled_, has_tokens_ = false, limits_more_ = false;
  // State of the current search.
  const TokenChain* chain_ = nullptr;
  bool with_partial_ = false;
  int64_t step_ = 1;        // hits end at multiples of this number of tokens
  int64_t num_hashed_ = 0;  // tokens
  bool with_host_ = false;
  SimulatedCache* simulated_ = nullptr;  // the cache to search; null: the pools
  int64_t compared_unit_ = 0;            // block size in which hits of simulated caches are counted
  std::vector<int64_t> num_leading_;     // number of leading blocks found, per group; -1: unknown
  PrefixHit hit_;
};

}  // namespace kvcache
