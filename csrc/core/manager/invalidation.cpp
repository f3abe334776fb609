// SPDX-License-Identifier: Apache-2.0
#include "core/manager/invalidation.h"

#include <algorithm>

#include "core/groups/rules/page_rules.h"

namespace kvcache {

void Invalidation::add_failed(const std::vector<BlockId>& blocks,
                              const std::vector<BlockId>& pages) {
  for (BlockId id : blocks) {
    blocks_.emplace(id, 0);
    add_hashes(*c_.pool, id);
  }
  for (BlockId page : pages) {
    pages_.insert(page);
    add_hashes(c_.host->pages(), page);
  }
  std::vector<BlockId> failed = blocks;
  if (c_.host != nullptr) {
    for (const HostTier::Onboard& onboard : c_.host->onboards()) {
      // The page does not have the content that the block should receive, so it must never be
      // onboarded again.
      const bool is_named = std::find(blocks.begin(), blocks.end(), onboard.block) != blocks.end();
      if (!is_named && pages_.count(onboard.page) == 0) continue;
      pages_.insert(onboard.page);
      add_hashes(c_.host->pages(), onboard.page);
      if (!blocks_.emplace(onboard.block, 0).second) continue;
      add_hashes(*c_.pool, onboard.block);
      failed.push_back(onboard.block);
    }
  }
  limit_by_drops(failed);
}

// Lowers the limits of rows that use invalid content, and adds the blocks that they have computed
// after their limits. Returns whether anything changed.
bool Invalidation::spread_once() {
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

std::vector<BlockId> Invalidation::blocks() const {
  std::vector<BlockId> all;
  for (const auto& [id, num_valid] : blocks_) all.push_back(id);
  std::sort(all.begin(), all.end());
  return all;
}

InvalidChains Invalidation::chains() const {
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

int64_t Invalidation::limit_by_blocks(int32_t row) const {
  int64_t limit = kUnbounded;
  const bool on_host = c_.row(row).is_on_host();
  for (const CacheGroup& group : *c_.groups) {
    const RowBlocks& each = c_.held(row, group);
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      if (on_host) {
        if (pages_.count(each[b]) != 0) return 0;  // the row is restarted anyway
        continue;
      }
      const auto found = blocks_.find(each[b]);
      if (found == blocks_.end()) continue;
      limit = std::min(limit, std::max(found->second, c_.rows->first_token(row, group, b)));
    }
  }
  return limit;
}

int64_t Invalidation::limit_by_hashes(int32_t row) const {
  int64_t limit = kUnbounded;
  const HashList& hashes = c_.row(row).chain->known_hashes();
  for (size_t i = 0; i < hashes.size() && !hashes_.empty(); ++i) {
    const auto found = hashes_.find(hashes[i]);
    if (found == hashes_.end()) continue;
    const InvalidHash& what = found->second;
    // The first token of the last hash block.
    const int64_t last = static_cast<int64_t>(i) * c_.hash_block_size;
    const int64_t of_block = last / what.block_size * what.block_size;
    limit = std::min(limit, std::max(of_block, what.num_valid));
  }
  return limit;
}

// The journal records dropped window blocks and state pages while the steps that used them may be
// in flight.
void Invalidation::limit_by_drops(const std::vector<BlockId>& ids) {
  const std::unordered_set<BlockId> failed(ids.begin(), ids.end());
  for (const StepJournal::Step& step : c_.journal->in_flight()) {
    for (const StepJournal::Dropped& each : step.dropped) {
      if (failed.count(each.id) == 0) continue;
      if (c_.rows->is_still(each.row, each.admission)) limit_row(each.row, each.first_token);
      add_used(*each.chain, each.first_token);
    }
  }
}

// A row that held the block may have read it to compute `first_token` and all later tokens,
// including tokens in blocks that the row has released.
void Invalidation::add_used(const TokenChain& chain, int64_t first_token) {
  const int64_t num_hashed = chain.num_known_hashes();
  for (const CacheGroup& group : *c_.groups) {
    if (!group.rules->traits.follows_sequence) continue;
    for (int64_t b = first_token / group.block_size; b * group.num_hashes < num_hashed; ++b) {
      add_dropped(chain, group, b, std::max(first_token, b * group.block_size));
    }
  }
}

// The last tokens of a row's last step, and of the step before it, may be drafts that have not been
// accepted or rejected. In that case, only tokens that must have been accepted stay valid.
int64_t Invalidation::confirmed_limit(int32_t row, int64_t limit) const {
  const Row& r = c_.row(row);
  const int64_t num_known = r.chain->num_tokens();
  const int64_t certain = r.start - r.num_undecided_before;
  if (limit <= certain || num_known > r.num_computed) return limit;
  return std::max(certain, std::min(limit, num_known - 1));
}

// Iterates to a fixed point, because a limit that one group lowers applies to all groups.
int64_t Invalidation::own_limit(int32_t row, int64_t limit) const {
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
bool Invalidation::add_computed(int32_t row, int64_t limit) {
  bool changed = false;
  const Row& r = c_.row(row);
  for (const CacheGroup& group : *c_.groups) {
    if (!group.rules->traits.follows_sequence) continue;
    const RowBlocks& each = c_.held(row, group);
    const int64_t size = c_.rows->num_written(row, group);
    for (int64_t b = group.rules->first_computed(group, each, limit); b < size; ++b) {
      const int64_t num_valid = group.rules->num_valid(group, b, limit);
      const BlockId id = r.is_on_host() ? kNullBlock : each[b];
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

bool Invalidation::add_block(BlockId id, int64_t num_valid) {
  const auto [known, is_new] = blocks_.emplace(id, num_valid);
  if (!is_new && known->second <= num_valid) return false;
  known->second = num_valid;
  return true;
}

// Adds the hashes under which other rows may have found the row's tokens in this block.
bool Invalidation::add_found(int32_t row, const CacheGroup& group, int64_t block, BlockId id,
                             int64_t num_valid) {
  const TokenChain& chain = *c_.row(row).chain;
  std::vector<Hash> found = c_.pool->partial_hashes_of(id);
  if (c_.pool->hash_of(id) != nullptr) found.push_back(*c_.pool->hash_of(id));
  const int64_t stop = std::min((block + 1) * group.num_hashes, chain.num_known_hashes());
  bool changed = false;
  for (int64_t i = num_valid / c_.hash_block_size; i < stop && !found.empty(); ++i) {
    const Hash& hash = chain.known_hash(i);
    if (std::find(found.begin(), found.end(), hash) == found.end()) continue;
    changed |= add_hash(hash, {num_valid, group.block_size});
  }
  return changed;
}

// Adds the hashes under which other rows may have found states inside the block, in pages that the
// row has left.
bool Invalidation::add_kept_states(int32_t row, const CacheGroup& group, int64_t block,
                                   int64_t num_valid) {
  const Row& r = c_.row(row);
  const int64_t stop = std::min(
      {r.num_computed / c_.hash_block_size, group.hash_index(block), r.chain->num_known_hashes()});
  bool changed = false;
  for (int64_t i = num_valid / c_.hash_block_size; i < stop && group.has_partial; ++i) {
    changed |= add_hash(r.chain->known_hash(i), {num_valid, group.block_size});
  }
  return changed;
}

// Adds the hashes of a block that its row has dropped or released, if lookups can still find the
// block. Whether they can find partial blocks is unknown, so all hashes of partial blocks are
// added.
bool Invalidation::add_dropped(const TokenChain& chain, const CacheGroup& group, int64_t block,
                               int64_t num_valid) {
  const int64_t last = group.hash_index(block);
  bool changed = false;
  // While the block was published, other rows may have used it and published their own results.
  if (chain.num_known_hashes() > 0) roots_.insert(short_tag_of(chain.known_hash(0)));
  for (int64_t i = num_valid / c_.hash_block_size; i < std::min(last + 1, chain.num_known_hashes());
       ++i) {
    const Hash& hash = chain.known_hash(i);
    const BlockId id = i == last ? c_.pool->find(hash, group.id) : kNullBlock;
    if (id != kNullBlock) changed |= add_block(id, num_valid);
    const bool is_found = id != kNullBlock || (i == last && page_of(hash, group.id) != kNullBlock);
    if (is_found || group.has_partial) changed |= add_hash(hash, {num_valid, group.block_size});
  }
  return changed;
}

bool Invalidation::add_hash(const Hash& hash, const InvalidHash& what) {
  const auto [known, is_new] = hashes_.emplace(hash, what);
  const InvalidHash before = known->second;
  known->second.num_valid = std::min(before.num_valid, what.num_valid);
  known->second.block_size = std::max(before.block_size, what.block_size);
  return is_new || known->second.num_valid < before.num_valid ||
         known->second.block_size > before.block_size;
}

}  // namespace kvcache
