// How blocks come back: at once or behind a fence; rows that lose some, or all, and go on.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::release_row(int32_t row, bool with_encoder) {
  const std::vector<BlockId> ids = rows_.tail_first(row, with_encoder);
  const auto n = static_cast<int64_t>(ids.size());
  if (rows_[row].on_host) {
    host_->pages().release(ids.data(), n);
  } else {
    frees_.release_or_defer(ids.data(), n);
  }
  for (const CacheGroup& group : groups_) {
    if (with_encoder || group.is_cacheable()) rows_.blocks(row)[group.id].clear();
  }
}

// For the eviction policy, before the row's blocks are given back.
void Manager::notify_release(int32_t row, ReleaseFeatures features) {
  if (!pool_.has_policy()) return;
  const AdmissionInfo& info = rows_.info(row);
  features.num_prefix_tokens = info.num_hit;
  features.num_output_tokens =
      std::max<int64_t>(rows_[row].chain->num_tokens() - info.num_prompt, 0);
  features.logical_time = ++num_releases_;
  features.wall_ms = clock_.now_ms();
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    if (!group.is_cacheable()) continue;
    features.num_new_blocks += std::max<int64_t>(rows_.num_written(row, group) - each.num_hits, 0);
  }
  std::vector<BlockId> ids;
  std::vector<int64_t> ends;
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    if (!group.is_cacheable()) continue;
    ids.assign(each.blocks.rbegin(), each.blocks.rend() - each.num_dropped);
    ends.clear();
    for (auto end = static_cast<int64_t>(each.blocks.size()); end > each.num_dropped; --end) {
      ends.push_back(end * group.block_size);
    }
    features.tokens_per_block = group.block_size;
    pool_.notify_release(ids.data(), ends.data(), static_cast<int64_t>(ends.size()), features);
  }
}

// Whether the row's own blocks hold all that the token at `num_tokens` reads, and the block that it
// goes into.
bool Manager::can_resume(const RowBlocks* held, int64_t num_tokens) const {
  if (num_tokens == 0) return false;  // the cache may still have something
  for (const CacheGroup& group : groups_) {
    if (group.holds_state()) return false;  // it was updated in place
    if (!group.holds_tokens()) continue;
    const bool needs_any =
        num_tokens % group.block_size != 0 || group.first_needed_token(num_tokens) < num_tokens;
    if (needs_any && held[group.id].num_dropped > group.first_needed_block(num_tokens)) {
      return false;
    }
  }
  return true;
}

void Manager::truncate(int32_t row, int64_t num_tokens) {
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    RowBlocks& each = rows_.blocks(row)[group.id];
    const auto kept = static_cast<size_t>(ceil_div(num_tokens, group.block_size));
    if (each.blocks.size() > kept) {
      std::vector<BlockId> dropped(each.blocks.rbegin(),
                                   each.blocks.rend() - static_cast<int64_t>(kept));
      // The tail of a table may already be gone.
      dropped.erase(std::remove(dropped.begin(), dropped.end(), kNullBlock), dropped.end());
      frees_.release_or_defer(dropped.data(), static_cast<int64_t>(dropped.size()));
      each.blocks.resize(kept);
    }
    each.num_dropped = std::min(each.num_dropped, static_cast<int64_t>(kept));
    each.num_published = std::min(each.num_published, num_tokens / group.block_size);
    each.num_partial = std::min(each.num_partial, num_tokens / hash_block_size_);
    each.num_hits = std::min(each.num_hits, static_cast<int64_t>(kept));
  }
  Row& r = rows_[row];
  r.num_computed = r.start = num_tokens;
  r.may_share = r.has_forked;
  publisher_.refresh(row);
}

// The row has given its blocks back; it goes on from what the device's cache has. What was swapped
// out of an encoder stays there: its pages come back with the row.
void Manager::restart(int32_t row) {
  Row& r = rows_[row];
  r.on_host = r.on_host && r.chain->num_encoder_tokens() > 0;
  r.has_forked = r.may_share = false;
  const PrefixHit& hit = find(*r.chain, /*with_partial=*/false, /*with_host=*/false);
  for (const CacheGroup& group : groups_) {
    if (group.is_cacheable()) RowGrowth::set_hit(&rows_.blocks(row)[group.id], group, hit);
  }
  ServedRow served;
  served.row = row;
  growth_.take_hit(&served, hit);
  r.num_computed = r.start = hit.num_tokens;
  r.is_stale = false;
  publisher_.refresh(row);
}

void Manager::resend(int32_t row) {
  if (rows_[row].by_step) plan_.resend(row);
}

// What a row that leaves has computed and nothing finds, and what it loads.
void Manager::note_left(int32_t row) {
  if (!journal_.notes(rows_[row])) return;
  for (const HostTier::Onboard& onboard : onboards()) {
    const RowBlocks& each = rows_.blocks(row)[onboard.group];
    if (onboard.column < each.size() && each[onboard.column] == onboard.block) {
      growth_.note_dropped(row, groups_[onboard.group], onboard.column, onboard.block);
    }
  }
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    if (!group.is_cacheable()) continue;
    const int64_t size = rows_.num_written(row, group);
    // What was published is found, unless something of this happened.
    const bool may_be_lost = has_forgotten_ || host_ != nullptr || rows_[row].has_forked;
    const int64_t first =
        may_be_lost ? each.num_dropped : std::max(each.num_dropped, each.num_published);
    for (int64_t b = first; b < size; ++b) {
      const BlockId id = each.blocks[static_cast<size_t>(b)];
      if (pool_.hash_of(id) == nullptr) growth_.note_dropped(row, group, b, id);
    }
  }
}

}  // namespace kvcache
