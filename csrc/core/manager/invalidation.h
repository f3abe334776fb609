// SPDX-License-Identifier: Apache-2.0
// Finds the rows affected by invalid content, and the token from which each row must recompute.
//
// Starts from blocks, host pages or rows that are known to be invalid, and adds everything computed
// from them until nothing new is found. Invariant: only the object's own state changes, the set of
// invalid content only grows, and limits only decrease.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/row_context.h"
#include "core/pool/block_pool.h"
#include "core/secret_key.h"

namespace kvcache {

class Invalidation {
 public:
  using Limits = std::map<int32_t, int64_t>;  // maximum number of valid tokens, by row

  // With `by_hash`, a row is affected if its tokens include the content of an invalid block, even
  // if the row does not hold that block. The row may have dropped or copied the block, or hit
  // content computed from it.
  Invalidation(const RowContext& context, bool by_hash) : c_(context), by_hash_(by_hash) {}

  // Adds device blocks and host pages with wrong content. Onboards into these blocks or from these
  // pages become invalid too.
  void add_failed(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages);
  // Adds an invalid block. The first num_valid tokens of the prefix that ends with this block
  // remain valid.
  // Returns whether this is new.
  bool add_block(BlockId id, int64_t num_valid);
  // Limits the valid tokens of this row to num_tokens.
  void limit_row(int32_t row, int64_t num_tokens) {
    const auto [limit, is_first] = limits_.emplace(row, num_tokens);
    limit->second = std::min(limit->second, num_tokens);
  }

  // Finds everything that was computed from the invalid content.
  void spread() {
    while (spread_once()) {
    }
  }

  // Returns the limits of all rows that must recompute, and possibly those of other rows.
  const Limits& limits() const { return limits_; }
  std::vector<BlockId> blocks() const;  // in ascending order
  InvalidChains chains() const;         // invalid chains of both tiers

 private:
  struct InvalidHash {
    int64_t num_valid;   // valid tokens of the prefix, at least up to the start of the block
    int64_t block_size;  // size of the block in which the prefix of the hash ends
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
  void add_hashes(const BlockPool& pool, BlockId id) {
    const int64_t block_size = (*c_.groups)[pool.group_of(id)].block_size;
    if (pool.hash_of(id) != nullptr) add_hash(*pool.hash_of(id), {0, block_size});
    for (const Hash& hash : pool.partial_hashes_of(id)) add_hash(hash, {0, block_size});
  }
  bool add_hash(const Hash& hash, const InvalidHash& what);
  BlockId page_of(const Hash& hash, uint8_t group) const {
    return c_.host == nullptr ? kNullBlock : c_.host->pages().find(hash, group);
  }

  const RowContext c_;
  bool by_hash_;
  Limits limits_;
  std::unordered_map<BlockId, int64_t> blocks_;  // block -> valid tokens of the prefix
  std::unordered_map<Hash, InvalidHash, HashOf> hashes_;
  std::unordered_set<BlockId> pages_;
  std::unordered_set<uint32_t> roots_;  // short tags of the roots of chains with dropped blocks
};

}  // namespace kvcache
