// Which rows are affected by invalid content, and from where each recomputes.
//
// Starts from blocks, pages of the host or rows that are known to be invalid, and follows what was
// computed from them until nothing new is found.
// Invariant: changes nothing but itself; what is found only grows, and limits only fall.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/host_tier.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"
#include "core/secret_key.h"

namespace kvcache {

// Everything that an invalidation looks at.
struct InvalidationContext {
  const std::vector<CacheGroup>* groups;
  int64_t hash_block_size;
  const BlockPool* pool;
  const HostTier* host;  // null where there is none
  const RowTable* rows;
  const StepJournal* journal;
};

class Invalidation {
 public:
  using Limits = std::map<int32_t, int64_t>;  // by row: tokens that are valid at most

  // With `by_hash`, rows whose tokens run through the content of an invalid block are affected
  // whether they hold that very block or not: they may have dropped it, copied it, or hit what was
  // computed from it.
  Invalidation(const InvalidationContext& context, bool by_hash)
      : context_(context), by_hash_(by_hash) {}

  // Blocks and pages of the host whose content is not what it should be. Onboards into these
  // blocks, or from these pages, are invalid too.
  void add_failed(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages);
  // So many tokens of the prefix that the block ends are valid.
  void add_block(BlockId id, int64_t num_valid) { add_invalid_block(id, num_valid); }
  // No more than so many tokens of this row are valid.
  void limit_row(int32_t row, int64_t num_tokens);

  // Follows what was computed from all that.
  void spread();

  const Limits& limits() const { return limits_; }  // of rows that recompute, and of some others
  std::vector<BlockId> blocks() const;              // ascending
  InvalidChains chains() const;                     // of both tiers

 private:
  struct InvalidHash {
    int64_t num_valid;   // tokens of the prefix that are valid all the same,
    int64_t block_size;  // but for those of the block of this size that the hash ends in: none less
  };

  bool spread_once();
  int64_t limit_by_blocks(int32_t row) const;
  int64_t limit_by_hashes(int32_t row) const;
  void limit_by_drops(const std::vector<BlockId>& ids);
  int64_t confirmed_limit(int32_t row, int64_t limit) const;
  int64_t own_limit(int32_t row, int64_t limit) const;
  bool add_computed(int32_t row, int64_t limit);
  bool add_found(int32_t row, const CacheGroup& group, int64_t block, BlockId id,
                 int64_t num_valid);
  bool add_kept_states(int32_t row, const CacheGroup& group, int64_t block, int64_t num_valid);
  bool add_dropped(const TokenChain& chain, const CacheGroup& group, int64_t block,
                   int64_t num_valid);
  void add_used(const TokenChain& chain, int64_t first_token);
  void add_hashes(const BlockPool& pool, BlockId id);
  bool add_invalid_block(BlockId id, int64_t num_valid);
  bool add_hash(const Hash& hash, const InvalidHash& what);
  BlockId page_of(const Hash& hash, uint8_t group) const;

  InvalidationContext context_;
  bool by_hash_;
  Limits limits_;
  std::unordered_map<BlockId, int64_t> blocks_;  // tokens of the prefix that are valid
  std::unordered_map<Hash, InvalidHash, HashOf> hashes_;
  std::unordered_set<BlockId> pages_;
  std::unordered_set<uint32_t> roots_;  // short tags, of chains that dropped blocks run in
};

}  // namespace kvcache
