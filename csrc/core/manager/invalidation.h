// SPDX-License-Identifier: Apache-2.0
// Finds the rows affected by invalid content, and the token from which each row must recompute.
//
// Starts from blocks, host pages or rows that are known to be invalid, and adds everything computed
// from them until nothing new is found. Invariant: only the object's own state changes, the set of
// invalid content only grows, and limits only decrease.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/rules/page_rules.h"
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
  void add_failed(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages) {
    for (BlockId id : blocks) add_failed_block(id);
    for (BlockId page : pages) add_failed_page(page);
    if (c_.host != nullptr) {
      for (const HostTier::Onboard& onboard : c_.host->onboards()) {
        if (blocks_.count(onboard.block) == 0 && pages_.count(onboard.page) == 0) continue;
        // The page does not have the content that the block should receive, so it must never be
        // onboarded again.
        add_failed_page(onboard.page);
        add_failed_block(onboard.block);
      }
    }
    limit_by_drops();
  }
  // Adds an invalid block. The first num_valid tokens of the prefix that ends with this block
  // remain valid. Returns whether this is new.
  bool add_block(BlockId id, int64_t num_valid) {
    const auto [known, is_new] = blocks_.emplace(id, num_valid);
    if (!is_new && known->second <= num_valid) return false;
    known->second = num_valid;
    return true;
  }
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
  // The invalid blocks, in ascending order.
  std::vector<BlockId> blocks() const {
    std::vector<BlockId> all;
    for (const auto& [id, num_valid] : blocks_) all.push_back(id);
    std::sort(all.begin(), all.end());
    return all;
  }
  // The invalid chains of both tiers.
  InvalidChains chains() const {
    InvalidChains chains;
    chains.roots = roots_;
    const std::vector<BlockId> ids = blocks();
    c_.pool->add_chains(ids.data(), static_cast<int64_t>(ids.size()), &chains);
    if (c_.host == nullptr) return chains;
    std::vector<BlockId> pages(pages_.begin(), pages_.end());
    for (const auto& [hash, what] : hashes_) {
      for (const CacheGroup& group : *c_.groups) {
        const BlockId page = page_of(hash, group.id);
        if (page != kNullBlock) pages.push_back(page);
      }
    }
    c_.host->pages().add_chains(pages.data(), static_cast<int64_t>(pages.size()), &chains);
    return chains;
  }

 private:
  struct InvalidHash {
    int64_t num_valid;   // valid tokens of the prefix, at least up to the start of the block
    int64_t block_size;  // size of the block in which the prefix of the hash ends
  };

  // Lowers the limits of rows that use invalid content, and adds the blocks that they have computed
  // after their limits. Returns whether anything changed.
  bool spread_once() {
    bool changed = false;
    const RowTable& rows = *c_.rows;
    for (int32_t row : rows.in_use()) {
      const auto known = limits_.find(row);
      const int64_t before = known == limits_.end() ? kUnbounded : known->second;
      int64_t limit = std::min(before, limit_by_blocks(row));
      if (by_hash_) limit = std::min(limit, limit_by_hashes(row));
      if (limit >= rows[row].num_computed) continue;
      limit = own_limit(row, confirmed_limit(row, limit));
      if (limit < before) {
        limits_[row] = limit;
        changed = true;
      }
      changed |= add_computed(row, limit);
    }
    return changed;
  }
  // Returns the number of valid tokens of the row, judged by the blocks that it holds.
  int64_t limit_by_blocks(int32_t row) const {
    // A row on the host is restarted in any case.
    if (c_.row(row).is_on_host()) return holds_invalid_page(row) ? 0 : kUnbounded;
    int64_t limit = kUnbounded;
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = c_.held(row, group);
      for (int64_t b = held.num_dropped; b < held.size(); ++b) {
        const auto known = blocks_.find(held[b]);
        if (known == blocks_.end()) continue;
        const auto& [id, num_valid] = *known;
        limit = std::min(limit, std::max(num_valid, c_.rows->first_token(row, group, b)));
      }
    }
    return limit;
  }
  bool holds_invalid_page(int32_t row) const {
    return std::any_of(c_.groups->begin(), c_.groups->end(), [&](const CacheGroup& group) {
      const RowBlocks& held = c_.held(row, group);
      return std::any_of(held.blocks.begin() + held.num_dropped, held.blocks.end(),
                         [&](BlockId page) { return pages_.count(page) != 0; });
    });
  }
  // The same, judged by its tokens, even if it does not hold the blocks with the invalid content.
  int64_t limit_by_hashes(int32_t row) const {
    int64_t limit = kUnbounded;
    const HashList& hashes = c_.row(row).chain->known_hashes();
    for (size_t i = 0; i < hashes.size() && !hashes_.empty(); ++i) {
      const auto known = hashes_.find(hashes[i]);
      if (known == hashes_.end()) continue;
      const auto& [num_valid, block_size] = known->second;  // tokens
      const int64_t start_of_hash_block = static_cast<int64_t>(i) * c_.hash_block_size;
      const int64_t start_of_block = start_of_hash_block / block_size * block_size;
      limit = std::min(limit, std::max(start_of_block, num_valid));
    }
    return limit;
  }
  // The journal records dropped window blocks and state pages while the steps that used them may be
  // in flight. A row that held a failed block may have read it to compute all tokens after it.
  void limit_by_drops() {
    const std::unordered_map<BlockId, int64_t> failed = blocks_;
    for (const StepJournal::Step& step : c_.journal->in_flight()) {
      for (const StepJournal::Dropped& each : step.dropped) {
        if (failed.count(each.id) == 0) continue;
        if (c_.rows->is_still(each.row, each.admission)) limit_row(each.row, each.first_token);
        add_dropped_from(*each.chain, each.first_token);
      }
    }
  }
  // The last tokens of a row's last step, and of the step before it, may be drafts that have not
  // been accepted or rejected. In that case, only tokens that must have been accepted stay valid.
  int64_t confirmed_limit(int32_t row, int64_t limit) const {
    const Row& r = c_.row(row);
    const int64_t num_known = r.chain->num_tokens();
    const int64_t certain = r.start - r.num_undecided_before;
    if (limit <= certain || num_known > r.num_computed) return limit;
    return std::max(certain, std::min(limit, num_known - 1));
  }
  // Iterates to a fixed point, because a limit that one group lowers applies to all groups.
  int64_t own_limit(int32_t row, int64_t limit) const {
    for (int64_t before = -1; limit != before;) {
      before = limit;
      for (const CacheGroup& group : *c_.groups) {
        limit = group.rules->resume_point(group, c_.held(row, group), limit);
      }
    }
    return limit;
  }
  // Adds the blocks with tokens that the row has computed after its first `limit` tokens. Returns
  // whether any block was added.
  bool add_computed(int32_t row, int64_t limit) {
    bool changed = false;
    const Row& r = c_.row(row);
    for (const CacheGroup& group : *c_.groups) {
      if (!group.rules->traits.follows_sequence) continue;
      const RowBlocks& held = c_.held(row, group);
      const int64_t size = c_.rows->num_written(row, group);
      for (int64_t b = group.rules->first_computed(group, held, limit); b < size; ++b) {
        const int64_t num_valid = group.rules->num_valid(group, b, limit);
        const BlockId id = r.is_on_host() ? kNullBlock : held[b];
        if (id != kNullBlock) {
          changed |= add_block(id, num_valid);
          if (by_hash_) changed |= add_found(row, group, b, id, num_valid);
          if (by_hash_ && group.rules->traits.updates_in_place) {
            changed |= add_kept_states(row, group, b, num_valid);
          }
        } else if (by_hash_) {
          changed |= add_dropped(*r.chain, group, b, num_valid);
        }
      }
    }
    return changed;
  }
  // Adds the hashes under which other rows may have found the row's tokens in this block.
  bool add_found(int32_t row, const CacheGroup& group, int64_t block, BlockId id,
                 int64_t num_valid) {
    const TokenChain& chain = *c_.row(row).chain;
    std::vector<Hash> found = c_.pool->partial_hashes_of(id);
    if (c_.pool->hash_of(id) != nullptr) found.push_back(*c_.pool->hash_of(id));
    if (found.empty()) return false;
    return add_hashes_of(chain, group, num_valid, (block + 1) * group.num_hashes, [&](int64_t i) {
      return std::find(found.begin(), found.end(), chain.known_hash(i)) != found.end();
    });
  }
  // Adds the hashes under which other rows may have found states inside the block, in pages that
  // the row has left.
  bool add_kept_states(int32_t row, const CacheGroup& group, int64_t block, int64_t num_valid) {
    if (!group.has_partial) return false;
    const Row& r = c_.row(row);
    const int64_t stop = std::min(r.num_computed / c_.hash_block_size, group.hash_index(block));
    return add_hashes_of(*r.chain, group, num_valid, stop, [](int64_t) { return true; });
  }
  // Adds the hashes of a block that its row has dropped or released, if lookups can find the block.
  // Whether they can find parts of the block is unknown, so the hashes of all parts are added.
  bool add_dropped(const TokenChain& chain, const CacheGroup& group, int64_t block,
                   int64_t num_valid) {
    // While the block was published, other rows may have used it and published their own results.
    if (chain.num_known_hashes() > 0) roots_.insert(short_tag_of(chain.known_hash(0)));
    const int64_t last = group.hash_index(block);
    bool is_new_block = false;
    const bool any_hash = add_hashes_of(chain, group, num_valid, last + 1, [&](int64_t i) {
      if (i < last) return group.has_partial;
      const Hash& hash = chain.known_hash(last);
      const BlockId id = c_.pool->find(hash, group.id);
      if (id != kNullBlock) is_new_block = add_block(id, num_valid);
      return group.has_partial || id != kNullBlock || page_of(hash, group.id) != kNullBlock;
    });
    return any_hash || is_new_block;
  }
  // Adds the blocks with the tokens of the chain from `first_token` on, which their row may have
  // dropped or released.
  void add_dropped_from(const TokenChain& chain, int64_t first_token) {
    const int64_t num_hashed = chain.num_known_hashes();
    for (const CacheGroup& group : *c_.groups) {
      if (!group.rules->traits.follows_sequence) continue;
      for (int64_t b = first_token / group.block_size; b * group.num_hashes < num_hashed; ++b) {
        add_dropped(chain, group, b, std::max(first_token, b * group.block_size));
      }
    }
  }
  // Adds the hashes of the chain after its first num_valid_tokens tokens, and below the known hash
  // `stop_hash`, for which `is_found` returns true. Returns whether anything changed.
  template <class IsFound>
  bool add_hashes_of(const TokenChain& chain, const CacheGroup& group, int64_t num_valid_tokens,
                     int64_t stop_hash, const IsFound& is_found) {
    bool changed = false;
    stop_hash = std::min(stop_hash, chain.num_known_hashes());
    for (int64_t i = num_valid_tokens / c_.hash_block_size; i < stop_hash; ++i) {
      if (!is_found(i)) continue;
      changed |= add_hash(chain.known_hash(i), {num_valid_tokens, group.block_size});
    }
    return changed;
  }
  void add_failed_block(BlockId id) {
    blocks_.emplace(id, 0);
    add_hashes(*c_.pool, id);
  }
  void add_failed_page(BlockId page) {
    pages_.insert(page);
    add_hashes(c_.host->pages(), page);
  }
  void add_hashes(const BlockPool& pool, BlockId id) {
    const int64_t block_size = (*c_.groups)[pool.group_of(id)].block_size;
    if (pool.hash_of(id) != nullptr) add_hash(*pool.hash_of(id), {0, block_size});
    for (const Hash& hash : pool.partial_hashes_of(id)) add_hash(hash, {0, block_size});
  }
  bool add_hash(const Hash& hash, const InvalidHash& what) {
    const auto [known, is_new] = hashes_.emplace(hash, what);
    const InvalidHash before = known->second;
    known->second.num_valid = std::min(before.num_valid, what.num_valid);
    known->second.block_size = std::max(before.block_size, what.block_size);
    return is_new || known->second.num_valid < before.num_valid ||
           known->second.block_size > before.block_size;
  }
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
