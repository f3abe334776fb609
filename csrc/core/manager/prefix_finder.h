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
#include "core/pool/eviction_order.h"

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
  static PrefixHit of_device(int64_t num_tokens, const std::vector<std::vector<BlockId>>& blocks) {
    PrefixHit hit;
    hit.num_tokens = num_tokens;
    hit.blocks = blocks;
    hit.on_host.resize(blocks.size());
    hit.sources.assign(blocks.size(), kNullBlock);
    return hit;
  }

  // Returns the first token of the hit whose block is on the host, or num_tokens if there is none.
  int64_t first_host_token(const std::vector<CacheGroup>& groups) const {
    int64_t first = num_tokens;
    for (const CacheGroup& group : groups) {
      const std::vector<HostBlock>& pages = on_host[group.id];
      if (!pages.empty()) first = std::min(first, pages.front().column * group.block_size);
    }
    return first;
  }

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
  // that its group finds is recomputed. The group must therefore find one more block than the hit
  // (one more hash block if hits can end inside blocks), even after the last token that a hit may
  // include.
  PrefixFinder(const Context& context, const ManagerOptions& options)
      : pool_(context.pool),
        host_(context.host),
        groups_(context.groups),
        ends_(context.ends),
        hash_block_size_(context.hash_block_size),
        is_enabled_(options.enable_caching &&
                    std::any_of(groups_->begin(), groups_->end(),
                                [](const CacheGroup& group) { return group.is_cached; })) {
    for (const CacheGroup& group : *groups_) {
      has_tokens_ |= group.rules->traits.appends && group.is_cached;
    }
    for (const bool keeps_all : {true, false}) {  // see find_in
      for (const CacheGroup& group : *groups_) {
        if (compared_unit_ > 0 || !group.is_cached || group.keeps_all != keeps_all) continue;
        compared_unit_ = group.block_size;
      }
    }
    limits_more_ = !std::all_of(groups_->begin(), groups_->end(), [this](const CacheGroup& group) {
      return ends_->limits_shared(group);
    });
    hit_.blocks.resize(groups_->size());
    hit_.on_host.resize(groups_->size());
    hit_.sources.resize(groups_->size());
  }

  // Returns the hit of a request: at most `most_tokens` tokens, and never the last token, which
  // must be computed. The hit is empty if caching is disabled or not `reads`. The hashes of the
  // chain must be known. Partial blocks are found only on the device. The result is valid until the
  // next call.
  const PrefixHit& find(const TokenChain& chain, bool with_partial, bool with_host, bool reads,
                        int64_t most_tokens = kUnbounded) {
    reads = reads && is_enabled_ && chain.num_tokens() > 0;
    begin(chain, reads, with_partial, with_host);
    hit_.num_host_blocks = 0;
    for (std::vector<BlockId>& blocks : hit_.blocks) blocks.clear();
    for (auto& on_host : hit_.on_host) on_host.clear();
    std::fill(hit_.sources.begin(), hit_.sources.end(), kNullBlock);

    const Lengths found = search(chain.num_tokens(), most_tokens);
    hit_.num_tokens = found.all;
    hit_.num_shared_tokens = has_tokens_ ? found.shared : 0;
    for (const CacheGroup& group : *groups_) collect(group);
    return hit_;
  }

  // Returns the number of blocks that an admitted request would hit in a simulated cache, which is
  // notified of the uses at the end of the hit. Only whole blocks count, in the first cached group
  // that keeps all tokens or, without one, in the first cached group. Does not change the last hit.
  int64_t find_in(SimulatedCache* cache, const TokenChain& chain) {
    begin(chain, is_enabled_, /*with_partial=*/false, /*with_host=*/false);
    simulated_ = cache;
    const Lengths found = search(chain.num_tokens());
    simulated_ = nullptr;
    // The request would read or compute the blocks at these ends.
    for (const CacheGroup& group : *groups_) {
      if (group.keeps_all || !group.is_cached || !group.rules->traits.has_hits) continue;
      for (const int64_t end : {found.all, has_tokens_ ? found.shared : found.all}) {
        for (int64_t b = group.first_hit_block(end); b < end / group.block_size; ++b) {
          cache->use_end(hash_at((b + 1) * group.block_size), group.id);
        }
      }
    }
    return found.all / compared_unit_;
  }
  int64_t compared_unit() const { return compared_unit_; }  // the size of these blocks

 private:
  // Starts a search for whole or partial blocks of this chain, or for none unless `reads`.
  void begin(const TokenChain& chain, bool reads, bool with_partial, bool with_host) {
    chain_ = &chain;
    num_hashed_ = reads ? chain.num_known_hashes() * hash_block_size_ : 0;
    with_partial_ = with_partial;
    with_host_ = with_host && host_ != nullptr;
    step_ = ends_->unit(with_partial);
    num_leading_.assign(groups_->size(), -1);
  }
  // The lengths of the hit in the groups that limit the shared prefix, and in all groups.
  struct Lengths {
    int64_t shared, all;
  };
  Lengths search(int64_t num_tokens, int64_t most_tokens = kUnbounded) {
    const auto found = [&](bool only_shared, int64_t most) {
      const int64_t longest = ends_->longest(num_tokens, num_hashed_, with_partial_, only_shared);
      return accepted_by_all(std::min(longest, most), only_shared);
    };
    const int64_t shared = found(/*only_shared=*/true, most_tokens);
    return {shared, limits_more_ ? found(/*only_shared=*/false, shared) : shared};
  }
  // Iterates to a fixed point, because shortening the hit in one group shortens it in all groups.
  int64_t accepted_by_all(int64_t num_tokens, bool only_shared) {
    num_tokens -= num_tokens % step_;
    for (int64_t before = -1; num_tokens != before && num_tokens > 0;) {
      before = num_tokens;
      // Groups that need the whole prefix come first, so that one miss identifies a cold prompt.
      for (bool whole : {true, false}) {
        for (const CacheGroup& group : *groups_) {
          if (only_shared && !ends_->limits_shared(group)) continue;
          if (group.keeps_all == whole && num_tokens > 0) num_tokens = accepted(group, num_tokens);
        }
      }
    }
    return num_tokens;
  }
  int64_t accepted(const CacheGroup& group, int64_t num_tokens) {
    if (!group.is_cached) return num_tokens;
    return group.keeps_all ? accepted_by_prefix(group, num_tokens)
                           : accepted_by_window(group, num_tokens);
  }
  int64_t accepted_by_prefix(const CacheGroup& group, int64_t num_tokens) {
    const int64_t bs = group.block_size, redone = group.num_redone(with_partial_);
    int64_t& num_leading = num_leading_[group.id];
    if (num_leading < 0) num_leading = find_leading(group, (num_tokens + redone) / bs);
    // The hit ends no later than inside the block that follows the whole blocks.
    num_tokens = std::min(num_tokens, (num_leading + 1) * bs - hash_block_size_ - redone);
    num_tokens -= num_tokens % step_;
    const auto is_missing = [&](int64_t n) {
      return n % bs != 0 && partial_block_of(group, n) == kNullBlock;
    };
    while (num_tokens > 0 && (is_missing(num_tokens) || is_missing(num_tokens + redone)))
      num_tokens -= step_;
    return std::max<int64_t>(num_tokens, 0);
  }
  int64_t accepted_by_window(const CacheGroup& group, int64_t num_tokens) {
    const int64_t bs = group.block_size, redone = group.num_redone(with_partial_);
    while (num_tokens > 0) {
      const int64_t first_token = group.first_needed_token(num_tokens);
      const bool reads_part = num_tokens % bs != 0 && first_token < num_tokens;
      if ((redone > 0 && !is_end_found(group, num_tokens + redone)) ||
          (reads_part && partial_block_of(group, num_tokens) == kNullBlock)) {
        num_tokens -= step_;
        continue;
      }
      // Searches backwards: the last missing block determines where the hit must end instead.
      int64_t block = num_tokens / bs - 1;
      while (block >= first_token / bs && is_found(group, block)) --block;
      if (block < first_token / bs) break;
      // The hit includes at most a part of the missing block.
      num_tokens = (block + 1) * bs - hash_block_size_;
      num_tokens -= num_tokens % step_;
    }
    return std::max<int64_t>(num_tokens, 0);
  }
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
  // Returns the number of consecutive blocks of a group that are found, starting with the first
  // block; at most num_blocks.
  int64_t find_leading(const CacheGroup& group, int64_t num_blocks) {
    int64_t n = 0;
    if (simulated_ != nullptr) {
      while (n < num_blocks && is_found(group, n)) ++n;
      return n;
    }
    // If the first block is missing, the prompt is cold, and no memory is prepared for the other
    // blocks.
    if (num_blocks == 0 || !is_found(group, 0)) return 0;
    std::vector<BlockId>& found = hit_.blocks[group.id];
    found.resize(static_cast<size_t>(num_blocks));
    for (;;) {
      n += find_run(*pool_, group, n);
      const int64_t stop = with_host_ ? n + find_run(*host_, group, n) : n;
      if (stop == n) return n;
      for (; n < stop; ++n) {
        // The device may contain this block even if it lacks some of the blocks before it.
        const BlockId id = device_block(group, n);
        if (id == kNullBlock) hit_.on_host[group.id].push_back({n, found[n]});
        found[n] = id;
      }
    }
  }
  // Stores the consecutive blocks that a pool contains, starting with block `first`, in the hit.
  // Returns their number.
  int64_t find_run(const BlockPool& pool, const CacheGroup& group, int64_t first) {
    std::vector<BlockId>& found = hit_.blocks[group.id];
    const int64_t most = static_cast<int64_t>(found.size()) - first;
    if (most == 0) return 0;
    const auto end_of = [&](int64_t i) { return (first + i + 1) * group.block_size; };
    const int64_t num_found = pool.lookup(&hash_at(end_of(0)), most, group.id, /*prefix=*/true,
                                          found.data() + first, group.num_hashes);
    if (chain_->variants() == nullptr) return num_found;
    int64_t n = 0;
    while (n < num_found && pool.is_variant(found[first + n], variant_at(end_of(n)))) ++n;
    return n;
  }
  BlockId partial_block_of(const CacheGroup& group, int64_t num_tokens) const {
    return pool_->find_partial(hash_at(num_tokens), group.id, variant_at(num_tokens));
  }
  // Stores the group's blocks of a hit of this length, which the search has found.
  void collect(const CacheGroup& group) {
    if (!group.rules->traits.has_hits) return;
    std::vector<BlockId>& blocks = hit_.blocks[group.id];
    std::vector<PrefixHit::HostBlock>& on_host = hit_.on_host[group.id];
    const int64_t num_tokens = hit_.num_tokens, num_blocks = num_tokens / group.block_size;
    blocks.resize(static_cast<size_t>(num_blocks));
    if (group.keeps_all && group.is_cached) {  // find_leading has stored these blocks, and more
      while (!on_host.empty() && on_host.back().column >= num_blocks) on_host.pop_back();
    } else {
      for (int64_t b = group.first_hit_block(num_tokens); b < num_blocks; ++b) {
        BlockId& id = blocks[static_cast<size_t>(b)];
        id = device_block(group, b);
        if (id == kNullBlock) on_host.push_back({b, host_page(group, b)});
      }
    }
    hit_.num_host_blocks += static_cast<int64_t>(on_host.size());
    if (hit_.has_part_of(group) && group.first_hit_token(num_tokens) < num_tokens) {
      hit_.sources[group.id] = partial_block_of(group, num_tokens);
    }
  }

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
