// How blocks come back: at once, behind a fence, or because what they hold is wrong.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/manager.h"

namespace kvcache {

void Manager::give_back(const BlockId* ids, int64_t n, int64_t step_id) {
  if (n == 0) return;
  if (!is_fenced(step_id)) {
    pool_.release(ids, n);
    return;
  }
  fences_.push_back({step_id, {ids, ids + n}});
  num_fenced_ += n;
}

void Manager::lift_fences() {
  while (!fences_.empty() && fences_.front().step_id < num_completed_) {
    const std::vector<BlockId>& ids = fences_.front().ids;
    pool_.release(ids.data(), static_cast<int64_t>(ids.size()));
    num_fenced_ -= static_cast<int64_t>(ids.size());
    fences_.pop_front();
  }
}

// Tails are evicted before heads, in all groups alike: what lies further back in the sequence goes
// first.
void Manager::give_back_row(Held* held, bool with_encoder) {
  dropped_.clear();
  std::vector<int64_t>& left = sizes_;
  for (const CacheGroup& group : groups_) {
    left[group.id] = static_cast<int64_t>(held[group.id].blocks.size());
    if (group.is_cacheable()) continue;
    if (with_encoder) {
      dropped_.insert(dropped_.end(), held[group.id].blocks.rbegin(), held[group.id].blocks.rend());
    }
    left[group.id] = 0;
  }
  for (;;) {
    const CacheGroup* last = nullptr;
    for (const CacheGroup& group : groups_) {
      if (left[group.id] <= held[group.id].num_dropped) continue;
      if (last == nullptr ||
          (left[group.id] - 1) * group.block_size > (left[last->id] - 1) * last->block_size) {
        last = &group;
      }
    }
    if (last == nullptr) break;
    dropped_.push_back(held[last->id].blocks[static_cast<size_t>(--left[last->id])]);
  }
  give_back(dropped_.data(), static_cast<int64_t>(dropped_.size()));
  for (const CacheGroup& group : groups_) {
    if (with_encoder || group.is_cacheable()) held[group.id].clear();
  }
}

Recompute Manager::abort(int64_t step_id) {
  const Call call(this);
  if (in_flight_.empty() || step_id < in_flight_.front().id || step_id > in_flight_.back().id) {
    throw std::invalid_argument("step_id is " + std::to_string(step_id) +
                                (in_flight_.empty()
                                     ? std::string(": no step is in flight")
                                     : ": expected " + std::to_string(in_flight_.front().id) +
                                           " to " + std::to_string(in_flight_.back().id) +
                                           ", the steps that may be in flight"));
  }
  hash_rows();
  std::vector<BlockId> published;
  std::vector<int64_t> limits(rows_.size(), kNothing);
  while (!in_flight_.empty() && in_flight_.back().id >= step_id) {
    const Step& step = in_flight_.back();
    published.insert(published.end(), step.published.begin(), step.published.end());
    for (const Step::Served& served : step.rows) {
      if (rows_[served.row].chain == nullptr || rows_[served.row].admission != served.admission) {
        continue;
      }
      int64_t start = served.start;
      for (const CacheGroup& group : groups_) {
        // The copy that the plan was to make did not come.
        if (served.is_new && held(served.row)[group.id].source != kNullBlock) {
          start -= start % group.block_size;
        }
      }
      limits[static_cast<size_t>(served.row)] =
          std::min(limits[static_cast<size_t>(served.row)], start);
      resend(served.row);
    }
    for (int32_t row : step.clear_rows) {
      if (rows_[row].chain != nullptr && rows_[row].by_step) {
        resend(row);
      } else {
        clear_rows_.push_back(row);
      }
    }
    in_flight_.pop_back();
  }
  // Nothing reads any more for these steps.
  last_issued_ = std::min(last_issued_, step_id - 1);
  for (Fence& fence : fences_) fence.step_id = std::min(fence.step_id, last_issued_);
  lift_fences();
  return withdraw(published, std::move(limits));
}

Recompute Manager::invalidate(const BlockId* ids, int64_t n) {
  const Call call(this);
  const std::vector<BlockId> bad(ids, ids + n);  // a digest from Python could change the caller's
  for (BlockId id : bad) pool_.ref_count(id);    // throws where it is none of the pool
  hash_rows();
  return withdraw(bad, std::vector<int64_t>(rows_.size(), kNothing));
}

// What a row has dropped is known by its hashes alone; restarted rows look theirs up.
void Manager::hash_rows() {
  for (const Row& row : rows_) {
    if (row.chain != nullptr) hash_ahead(*row.chain, /*reads=*/true);
  }
}

// `limits`: per row, how many of its computed tokens are right at most.
Recompute Manager::withdraw(const std::vector<BlockId>& ids, std::vector<int64_t> limits) {
  std::vector<char> bad(static_cast<size_t>(pool_.num_blocks()), 0);
  for (BlockId id : ids) bad[static_cast<size_t>(id)] = 1;
  spread(&bad, &limits);

  std::vector<BlockId> all;
  for (BlockId id = 1; id < pool_.num_blocks(); ++id) {
    if (bad[static_cast<size_t>(id)]) all.push_back(id);
  }
  pool_.evict_derived(all.data(), static_cast<int64_t>(all.size()), is_uniform_);

  Recompute out;
  std::vector<int32_t> to_restart;
  for (int32_t row = 0; row < static_cast<int32_t>(rows_.size()); ++row) {
    const int64_t limit = limits[static_cast<size_t>(row)];
    if (rows_[row].chain == nullptr || limit >= rows_[row].num_computed) continue;
    out.rows.push_back(row);
    if (can_resume(held(row), limit)) {
      truncate(row, limit);
    } else {
      give_back_row(held(row), /*with_encoder=*/false);
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

// What was computed from bad blocks is bad; who holds a bad block has computed from it.
void Manager::spread(std::vector<char>* bad, std::vector<int64_t>* limits) const {
  HashSet hashes;
  const auto add_hash = [&](BlockId id) {
    if (pool_.hash_of(id) != nullptr) hashes.insert(*pool_.hash_of(id));
  };
  for (BlockId id = 1; id < pool_.num_blocks(); ++id) {
    if ((*bad)[static_cast<size_t>(id)]) add_hash(id);
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (int32_t row = 0; row < static_cast<int32_t>(rows_.size()); ++row) {
      const Row& r = rows_[row];
      if (r.chain == nullptr) continue;
      int64_t& limit = (*limits)[static_cast<size_t>(row)];
      const int64_t found =
          std::min(limit_by_blocks(row, *bad, limit), limit_by_hashes(row, hashes, limit));
      if (found < limit) limit = found - found % finder_.whole_unit();
      for (const CacheGroup& group : groups_) {
        if (!group.is_cacheable()) continue;
        const Held& each = held(row)[group.id];
        const auto size = static_cast<int64_t>(each.blocks.size());
        for (int64_t b = each.num_dropped; b < size && b * group.block_size < r.num_computed; ++b) {
          const BlockId id = each.blocks[static_cast<size_t>(b)];
          if ((b + 1) * group.block_size <= limit || (*bad)[static_cast<size_t>(id)]) continue;
          (*bad)[static_cast<size_t>(id)] = 1;
          add_hash(id);
          changed = true;
        }
      }
    }
  }
}

int64_t Manager::limit_by_blocks(int32_t row, const std::vector<char>& bad, int64_t limit) const {
  int64_t least = limit;
  for (const CacheGroup& group : groups_) {
    const Held& each = held(row)[group.id];
    const auto size = static_cast<int64_t>(each.blocks.size());
    for (int64_t b = each.num_dropped; b < size; ++b) {
      if (!bad[static_cast<size_t>(each.blocks[static_cast<size_t>(b)])]) continue;
      const int64_t start = group.is_cacheable() ? b * group.block_size : 0;
      if (start >= rows_[row].num_computed) break;  // nothing in it yet
      // A limit inside a block is that of the row's own last step: what lies before it is right.
      if (limit != kNothing && start < limit && limit < start + group.block_size) continue;
      least = std::min(least, start);
    }
    if (each.source != kNullBlock && bad[static_cast<size_t>(each.source)]) {
      least = std::min(least, each.num_copied / group.block_size * group.block_size);
    }
  }
  return least;
}

// Blocks that a row has dropped are told by their hashes.
int64_t Manager::limit_by_hashes(int32_t row, const HashSet& bad, int64_t limit) const {
  if (bad.empty()) return limit;
  const std::vector<Hash>& known = rows_[row].chain->known_hashes();
  for (const CacheGroup& group : groups_) {
    const int64_t num_dropped = held(row)[group.id].num_dropped;
    for (int64_t b = 0; b < num_dropped; ++b) {
      const auto last_hash = static_cast<size_t>((b + 1) * group.num_hashes - 1);
      if (last_hash >= known.size()) break;
      if (bad.count(known[last_hash]) == 0) continue;
      limit = std::min(limit, b * group.block_size);
      break;
    }
  }
  return limit;
}

// Whether the row's own blocks hold all that the token at `num_tokens` reads.
bool Manager::can_resume(const Held* held, int64_t num_tokens) const {
  if (num_tokens == 0) return false;  // the cache may still have something
  for (const CacheGroup& group : groups_) {
    if (group.holds_state()) return false;  // it was updated in place
    if (group.holds_tokens() && group.first_needed_token(num_tokens) < num_tokens &&
        held[group.id].num_dropped > group.first_needed_block(num_tokens)) {
      return false;
    }
  }
  return true;
}

void Manager::truncate(int32_t row, int64_t num_tokens) {
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    Held& each = held(row)[group.id];
    const auto kept = static_cast<size_t>(ceil_div(num_tokens, group.block_size));
    if (each.blocks.size() > kept) {
      dropped_.assign(each.blocks.rbegin(), each.blocks.rend() - static_cast<int64_t>(kept));
      // The tail of a table may already be gone.
      dropped_.erase(std::remove(dropped_.begin(), dropped_.end(), kNullBlock), dropped_.end());
      give_back(dropped_.data(), static_cast<int64_t>(dropped_.size()));
      each.blocks.resize(kept);
    }
    each.num_dropped = std::min(each.num_dropped, static_cast<int64_t>(kept));
    each.num_published = std::min(each.num_published, num_tokens / group.block_size);
    each.num_parts = std::min(each.num_parts, num_tokens / hash_block_size_);
    if (num_tokens < each.num_copied) each.source = kNullBlock;
  }
  Row& r = rows_[row];
  r.num_computed = r.start = num_tokens;
  r.next_publish = next_publish(r, held(row));
}

// The row has given its blocks back; it goes on from what the cache has.
void Manager::restart(int32_t row) {
  Row& r = rows_[row];
  const PrefixHit& hit = find(*r.chain, /*with_parts=*/false);
  Held* h = held(row);
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    set_hit(&h[group.id], group, hit);
  }
  take_hits(h, hit);
  r.num_computed = r.start = hit.num_tokens;
  r.is_stale = false;
  r.next_publish = next_publish(r, h);
}

void Manager::resend(int32_t row) {
  if (!rows_[row].by_step || rows_[row].must_resend) return;
  rows_[row].must_resend = true;
  resend_.push_back(row);
}

}  // namespace kvcache
