// What is wrong when some blocks are, and who has used it.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

Recompute Manager::invalidate_blocks(const std::vector<BlockId>& ids,
                                     const std::vector<BlockId>& host_ids) {
  Invalid invalid;
  Limits limits;
  for (BlockId id : ids) {
    invalid.blocks.emplace(id, 0);
    add_hashes(pool_, id, &invalid);
  }
  for (BlockId id : host_ids) {
    invalid.host.insert(id);
    add_hashes(host_->pages(), id, &invalid);
  }
  std::vector<BlockId> failed = ids;
  for (const HostTier::Onboard& onboard : onboards()) {
    // What was to be loaded is not there, or should not have been. Nobody is to onboard it again.
    const bool is_named = std::find(ids.begin(), ids.end(), onboard.block) != ids.end();
    const bool is_from_bad = invalid.host.count(onboard.page) != 0;
    if (!is_named && !is_from_bad) continue;
    invalid.host.insert(onboard.page);
    add_hashes(host_->pages(), onboard.page, &invalid);
    if (!invalid.blocks.emplace(onboard.block, 0).second) continue;
    add_hashes(pool_, onboard.block, &invalid);
    failed.push_back(onboard.block);
  }
  limit_by_drops(failed, &invalid, &limits);
  return take_back_invalid(std::move(invalid), std::move(limits), /*by_hash=*/true);
}

// Of a row in `limits`, no more than so many tokens are right. With `by_hash`, rows whose tokens
// run through the content of a invalid block are affected whether they hold that very block or not:
// they may have dropped it, copied it, or hit what was computed from it.
Recompute Manager::take_back_invalid(Invalid invalid, Limits limits, bool by_hash) {
  has_forgotten_ = true;
  while (spread(&invalid, &limits, by_hash)) {
  }
  std::vector<BlockId> all;
  for (const auto& [id, num_right] : invalid.blocks) all.push_back(id);
  std::sort(all.begin(), all.end());  // the order in which they are freed
  if (by_hash) {
    evict_derived(all, &invalid);
  } else {
    pool_.evict(all.data(), static_cast<int64_t>(all.size()));
  }

  Recompute out;
  std::vector<int32_t> to_restart;
  for (const auto& [row, limit] : limits) {
    if (limit >= rows_[row].num_computed) continue;
    out.rows.push_back(row);
    if (!rows_[row].on_host && can_resume(rows_.blocks(row), limit)) {
      truncate(row, limit);
    } else {
      release_row(row, /*with_encoder=*/false);
      to_restart.push_back(row);
    }
    if (rows_[row].by_step) resend(row);
  }
  for (int32_t row : to_restart) restart(row);
  for (int32_t row : out.rows) {
    out.num_computed_tokens.push_back(static_cast<int32_t>(rows_[row].num_computed));
  }
  return out;
}

// Of both tiers: what is invalid, and what follows from it.
void Manager::evict_derived(const std::vector<BlockId>& ids, Invalid* invalid) {
  InvalidChains chains;
  chains.roots = std::move(invalid->roots);
  pool_.add_chains(ids.data(), static_cast<int64_t>(ids.size()), &chains);
  if (host_ != nullptr) {
    for (const auto& [hash, what] : invalid->hashes) {
      for (const CacheGroup& group : groups_) {
        const BlockId page = host_->pages().find(hash, group.id);
        if (page != kNullBlock) invalid->host.insert(page);
      }
    }
    const std::vector<BlockId> pages(invalid->host.begin(), invalid->host.end());
    host_->pages().add_chains(pages.data(), static_cast<int64_t>(pages.size()), &chains);
  }
  pool_.evict_derived(chains, is_uniform_);
  if (host_ != nullptr) host_->pages().evict_derived(chains, is_uniform_);
}

// Lowers the limits of rows that use invalid content, and adds what they have computed behind them.
// Whether anything changed.
bool Manager::spread(Invalid* invalid, Limits* limits, bool by_hash) const {
  bool changed = false;
  for (int32_t row = 0; row < rows_.size(); ++row) {
    if (!rows_.is_in_use(row)) continue;
    const auto known = limits->find(row);
    const int64_t before = known == limits->end() ? kUnbounded : known->second;
    int64_t limit = std::min(before, limit_by_blocks(row, *invalid));
    if (by_hash) limit = std::min(limit, limit_by_hashes(row, *invalid));
    if (limit >= rows_[row].num_computed) continue;
    limit = own_limit(row, confirmed_limit(row, limit));
    if (limit < before) {
      (*limits)[row] = limit;
      changed = true;
    }
    changed |= add_computed(row, limit, by_hash, invalid);
  }
  return changed;
}

int64_t Manager::limit_by_blocks(int32_t row, const Invalid& invalid) const {
  int64_t limit = kUnbounded;
  const bool on_host = rows_[row].on_host;
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      const BlockId id = each.blocks[static_cast<size_t>(b)];
      if (on_host) {
        if (invalid.host.count(id) != 0) return 0;  // it starts anew in any case
        continue;
      }
      const auto found = invalid.blocks.find(id);
      if (found == invalid.blocks.end()) continue;
      limit =
          std::min(limit, group.is_cacheable() ? std::max(found->second, b * group.block_size) : 0);
    }
  }
  return limit;
}

int64_t Manager::limit_by_hashes(int32_t row, const Invalid& invalid) const {
  int64_t limit = kUnbounded;
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  for (size_t i = 0; i < hashes.size() && !invalid.hashes.empty(); ++i) {
    const auto found = invalid.hashes.find(hashes[i]);
    if (found == invalid.hashes.end()) continue;
    const InvalidHash& what = found->second;
    const auto last =
        static_cast<int64_t>(i) * hash_block_size_;  // where its last hash block begins
    const int64_t of_block = last / what.block_size * what.block_size;
    limit = std::min(limit, std::max(of_block, what.num_right));
  }
  return limit;
}

// Blocks that left a window, and pages that states left, are known for as long as their steps may
// be in flight.
void Manager::limit_by_drops(const std::vector<BlockId>& ids, Invalid* invalid,
                             Limits* limits) const {
  const std::unordered_set<BlockId> failed(ids.begin(), ids.end());
  for (const StepJournal::Step& step : journal_.in_flight()) {
    for (const StepJournal::Dropped& each : step.dropped) {
      if (failed.count(each.id) == 0) continue;
      const Row& row = rows_[each.row];
      if (row.chain == nullptr || row.admission != each.admission) {
        add_left(*each.chain, each.first_token, invalid);
        continue;
      }
      const auto [limit, is_first] = limits->emplace(each.row, each.first_token);
      limit->second = std::min(limit->second, each.first_token);
    }
  }
}

// What a row that has left may have computed from token `first_token` on.
void Manager::add_left(const TokenChain& chain, int64_t first_token, Invalid* invalid) const {
  const auto num_hashed = static_cast<int64_t>(chain.known_hashes().size());
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    for (int64_t b = first_token / group.block_size; b * group.num_hashes < num_hashed; ++b) {
      add_dropped(chain, group, b, std::max(first_token, b * group.block_size), invalid);
    }
  }
}

// Of what a row's last step computed, tokens at the end may be drafts of which nobody has said yet
// that they were rejected. Where not all of it was prompt, all but what must have been right is
// lost.
int64_t Manager::confirmed_limit(int32_t row, int64_t limit) const {
  const Row& r = rows_[row];
  const int64_t num_known = r.chain->num_tokens();
  if (limit <= r.start || num_known > r.num_computed) return limit;
  return std::max(r.start, std::min(limit, num_known - 1));
}

// A row may go on inside a block only where nobody else can hold that block: one of its own.
int64_t Manager::own_limit(int32_t row, int64_t limit) const {
  for (int64_t before = -1; limit != before;) {
    before = limit;
    for (const CacheGroup& group : groups_) {
      if (!group.holds_tokens() ||
          limit / group.block_size >= rows_.blocks(row)[group.id].num_hits) {
        continue;
      }
      limit -= limit % group.block_size;
    }
  }
  return limit;
}

// What the row has computed from token `limit` on. Whether any of it was not known to be invalid.
bool Manager::add_computed(int32_t row, int64_t limit, bool by_hash, Invalid* invalid) const {
  bool changed = false;
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    const RowBlocks& each = rows_.blocks(row)[group.id];
    const int64_t size = rows_.num_written(row, group);
    for (int64_t b = std::max(each.num_hits, limit / group.block_size); b < size; ++b) {
      const int64_t num_right = std::max(limit, b * group.block_size);
      const BlockId id = rows_[row].on_host ? kNullBlock : each.blocks[static_cast<size_t>(b)];
      if (id != kNullBlock) {
        changed |= add_block(id, num_right, invalid);
        if (by_hash) changed |= add_found(row, group, b, id, num_right, invalid);
      } else if (by_hash) {
        changed |= add_dropped(*rows_[row].chain, group, b, num_right, invalid);
      }
    }
  }
  return changed;
}

bool Manager::add_block(BlockId id, int64_t num_right, Invalid* invalid) {
  const auto [known, is_new] = invalid->blocks.emplace(id, num_right);
  if (!is_new && known->second <= num_right) return false;
  known->second = num_right;
  return true;
}

// The hashes under which others may have found what the row computed into this block.
bool Manager::add_found(int32_t row, const CacheGroup& group, int64_t block, BlockId id,
                        int64_t num_right, Invalid* invalid) const {
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  std::vector<Hash> found = pool_.partial_hashes_of(id);
  if (pool_.hash_of(id) != nullptr) found.push_back(*pool_.hash_of(id));
  const int64_t last =
      std::min((block + 1) * group.num_hashes, static_cast<int64_t>(hashes.size()));
  bool changed = false;
  for (int64_t i = num_right / hash_block_size_; i < last && !found.empty(); ++i) {
    const Hash& hash = hashes[static_cast<size_t>(i)];
    if (std::find(found.begin(), found.end(), hash) == found.end()) continue;
    changed |= add_hash(hash, {num_right, group.block_size}, invalid);
  }
  return changed;
}

// The same of a block that nobody can name any more, because its row has dropped it or has left: as
// long as it is found; of parts nobody knows.
bool Manager::add_dropped(const TokenChain& chain, const CacheGroup& group, int64_t block,
                          int64_t num_right, Invalid* invalid) const {
  const std::vector<Hash>& hashes = chain.known_hashes();
  const int64_t end = (block + 1) * group.num_hashes;
  bool changed = false;
  // Others may have used it while it was found, and be found themselves.
  if (!hashes.empty()) invalid->roots.insert(hashes[0].tag());
  for (int64_t i = num_right / hash_block_size_;
       i < std::min(end, static_cast<int64_t>(hashes.size())); ++i) {
    const Hash& hash = hashes[static_cast<size_t>(i)];
    const BlockId id = i + 1 == end ? pool_.find(hash, group.id) : kNullBlock;
    if (id != kNullBlock) changed |= add_block(id, num_right, invalid);
    const bool on_host = id == kNullBlock && i + 1 == end && host_ != nullptr &&
                         host_->pages().find(hash, group.id) != kNullBlock;
    if (id == kNullBlock && !on_host && !group.has_partial) continue;
    changed |= add_hash(hash, {num_right, group.block_size}, invalid);
  }
  return changed;
}

void Manager::add_hashes(const BlockPool& pool, BlockId id, Invalid* invalid) const {
  const int64_t block_size = groups_[pool.group_of(id)].block_size;
  if (pool.hash_of(id) != nullptr) add_hash(*pool.hash_of(id), {0, block_size}, invalid);
  for (const Hash& hash : pool.partial_hashes_of(id)) add_hash(hash, {0, block_size}, invalid);
}

bool Manager::add_hash(const Hash& hash, const InvalidHash& what, Invalid* invalid) {
  const auto [known, is_new] = invalid->hashes.emplace(hash, what);
  const InvalidHash before = known->second;
  known->second.num_right = std::min(before.num_right, what.num_right);
  known->second.block_size = std::max(before.block_size, what.block_size);
  return is_new || known->second.num_right < before.num_right ||
         known->second.block_size > before.block_size;
}

}  // namespace kvcache
