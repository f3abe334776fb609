// The longest prefix that all cache groups of a manager can take from the cache, be it the device's
// or the host's.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/options.h"
#include "core/pool/block_pool.h"

namespace kvcache {

struct PrefixHit {
  struct HostBlock {  // of a hit, that is on the host
    int64_t column;   // block of the sequence
    BlockId page;
  };
  int64_t num_tokens = 0;
  // What the groups of tokens would hit, whatever states are kept; 0 where there are none.
  int64_t num_shared_tokens = 0;
  // Per group: whole blocks; null where they are not read any more, or are on the host.
  std::vector<std::vector<BlockId>> blocks;
  std::vector<std::vector<HostBlock>> on_host;  // per group, by column
  int64_t num_host_blocks = 0;
  // Per group: the block whose first num_tokens % block_size tokens are to be copied, or null.
  std::vector<BlockId> sources;

  // The hit of a caller that has looked up whole blocks of the device.
  static PrefixHit of_device(int64_t num_tokens, const std::vector<std::vector<BlockId>>& blocks);

  // From here on, the hit rests on pages of the host; num_tokens where it has none.
  int64_t first_host_token(const std::vector<CacheGroup>& groups) const;

  // The group's blocks; with the one that is to be copied, last.
  std::vector<BlockId> ids(const CacheGroup& group) const {
    std::vector<BlockId> out = blocks[group.id];
    if (has_part_of(group)) out.push_back(sources[group.id]);
    return out;
  }
  // Whether the hit ends inside a block of the group; where that is not read, its source is null.
  bool has_part_of(const CacheGroup& group) const {
    return num_tokens % group.block_size != 0 && !group.holds_encoder() && !group.is_circular();
  }

  bool copies_partial() const {
    for (BlockId source : sources) {
      if (source != kNullBlock) return true;
    }
    return false;
  }
};

class PrefixFinder {
 public:
  struct Context {
    const BlockPool* pool;
    const BlockPool* host;  // null where there is none
    const std::vector<CacheGroup>* groups;
    int64_t hash_block_size;
  };
  // A drafter needs the hidden states of the tokens before those that are computed, so the last
  // block that its group finds is computed anew: the group finds one block more than the hit takes,
  // be it behind the last token but one. Where hits end inside blocks, one hash block is enough.
  PrefixFinder(const Context& context, const ManagerOptions& options);

  // The hit of a request, at most all its tokens but the last; valid until the next call. None
  // where caching is off or the request does not read the cache. Changes no pool. The chain's
  // hashes must be known. Partial blocks are found on the device only.
  const PrefixHit& find(const TokenChain& chain, bool with_partial, bool with_host) {
    return find(chain, with_partial, with_host, chain.read_cache());
  }
  // The same where the call says whether the request reads.
  const PrefixHit& find(const TokenChain& chain, bool with_partial, bool with_host, bool reads);

  // Tokens: hits end at multiples of them, with and without those that end inside blocks.
  int64_t unit() const { return unit_; }
  int64_t whole_unit() const { return whole_unit_; }

 private:
  int64_t accepted_by_all(int64_t num_tokens, bool with_states);
  int64_t accepted(const CacheGroup& group, int64_t num_tokens);
  int64_t accepted_by_prefix(const CacheGroup& group, int64_t num_tokens);
  int64_t accepted_by_window(const CacheGroup& group, int64_t num_tokens);
  // Of the prefix of so many tokens.
  const Hash& hash_at(int64_t num_tokens) const;
  uint64_t variant_at(int64_t num_tokens) const;
  bool is_end_found(const CacheGroup& group, int64_t num_tokens) const;
  BlockId device_block(const CacheGroup& group, int64_t block) const;
  BlockId host_page(const CacheGroup& group, int64_t block) const;
  bool is_found(const CacheGroup& group, int64_t block) const {
    return device_block(group, block) != kNullBlock || host_page(group, block) != kNullBlock;
  }
  int64_t find_leading(const CacheGroup& group, int64_t num_blocks);
  BlockId partial_block_of(const CacheGroup& group, int64_t num_tokens) const;
  void collect(const CacheGroup& group);

  const BlockPool* pool_;
  const BlockPool* host_;
  const std::vector<CacheGroup>* groups_;
  int64_t hash_block_size_;
  // Hits end at multiples of it, with and without those that end inside blocks.
  int64_t unit_ = 1, whole_unit_ = 1;
  bool is_enabled_, has_tokens_ = false, has_states_ = false;
  // The search at hand:
  const std::vector<Hash>* hashes_ = nullptr;
  const uint64_t* variants_ = nullptr;
  bool with_partial_ = false;
  int64_t step_ = 1;        // unit_ or whole_unit_
  int64_t num_hashed_ = 0;  // tokens
  bool with_host_ = false;
  std::vector<int64_t> num_leading_;  // per group: blocks found from the start; -1: not asked yet
  PrefixHit hit_;
};

}  // namespace kvcache
