// How blocks come back: at once, behind a fence, or because what they hold is wrong.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/manager.h"

namespace kvcache {

void Manager::give_back(const BlockId* ids, int64_t n, int64_t step_id) {
  if (n == 0) return;
  if (!is_fenced(step_id)) {
    pool_.release(ids, n);
    return;
  }
  fences_.push_back({step_id, {ids, ids + n}});
  for (int64_t i = 0; i < n; ++i) ++fenced_[static_cast<size_t>(ids[i])];
  num_fenced_ += n;
}

void Manager::lift_fences() {
  while (!fences_.empty() && fences_.front().step_id < num_completed_) {
    const std::vector<BlockId>& ids = fences_.front().ids;
    pool_.release(ids.data(), static_cast<int64_t>(ids.size()));
    for (BlockId id : ids) --fenced_[static_cast<size_t>(id)];
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

// Checks everything first: what a report says is taken in whole or not at all.
Recompute Manager::report(int64_t step_id, bool completed, const BlockId* failed, int64_t n) {
  const Call call(this);
  check_step_id(step_id);
  const std::vector<BlockId> bad = checked_ids(failed, n);
  if (!completed) check_may_abort(step_id);
  hash_rows();
  Recompute all;
  if (completed) {
    complete_to(step_id);
  } else {
    all = abort_from(step_id);
  }
  if (bad.empty()) return all;
  const Recompute more = withdraw_ids(bad);
  all.rows.insert(all.rows.end(), more.rows.begin(), more.rows.end());
  all.num_computed_tokens.insert(all.num_computed_tokens.end(), more.num_computed_tokens.begin(),
                                 more.num_computed_tokens.end());
  return all;
}

Recompute Manager::abort(int64_t step_id) {
  const Call call(this);
  check_step_id(step_id);
  check_may_abort(step_id);
  hash_rows();
  return abort_from(step_id);
}

Recompute Manager::invalidate(const BlockId* ids, int64_t n) {
  const Call call(this);
  const std::vector<BlockId> bad = checked_ids(ids, n);
  hash_rows();
  return withdraw_ids(bad);
}

void Manager::complete(int64_t step_id) {
  const Call call(this);
  check_step_id(step_id);
  complete_to(step_id);
}

void Manager::check_step_id(int64_t step_id) const {
  if (step_id >= 0 && step_id < num_steps_) return;
  throw std::invalid_argument(
      "step_id is " + std::to_string(step_id) +
      (num_steps_ == 0
           ? std::string(": there was no step yet")
           : ": expected 0 to " + std::to_string(num_steps_ - 1) + ", the steps there were"));
}

void Manager::check_may_abort(int64_t step_id) const {
  const char* why = step_id < num_completed_                   ? "it was reported done"
                    : step_id < num_steps_ - kMaxStepsInFlight ? "it is too long ago"
                                                               : nullptr;
  if (why == nullptr) return;
  throw std::invalid_argument("step_id is " + std::to_string(step_id) +
                              ": expected a step that may be in flight, but " + why);
}

// A copy: a digest from Python could change the caller's.
std::vector<BlockId> Manager::checked_ids(const BlockId* ids, int64_t n) const {
  const std::vector<BlockId> out(ids, ids + n);
  for (BlockId id : out) pool_.ref_count(id);  // throws where it is none of the pool
  return out;
}

// What a row has dropped is known by its hashes alone; restarted rows look theirs up.
void Manager::hash_rows() {
  for (const Row& row : rows_) {
    if (row.chain != nullptr) hash_ahead(*row.chain, /*reads=*/true);
  }
  for (const Step& step : in_flight_) {
    for (const Step::Dropped& each : step.dropped) hash_ahead(*each.chain, /*reads=*/true);
  }
}

void Manager::complete_to(int64_t step_id) {
  num_completed_ = std::max(num_completed_, step_id + 1);
  while (!in_flight_.empty() && in_flight_.front().id < num_completed_) in_flight_.pop_front();
  lift_fences();
}

// Everything that was computed from what an aborted step computed, an aborted step has computed: a
// row goes back to where its first one began, and what its blocks hold from there on is bad.
Recompute Manager::abort_from(int64_t step_id) {
  const auto is_it = [&](const Step& step) { return step.id == step_id; };
  if (std::none_of(in_flight_.begin(), in_flight_.end(), is_it)) return {};  // aborted before
  Bad bad;
  Limits limits;
  std::vector<Step::Published> published;
  std::vector<Step::Dropped> dropped;
  const auto is_there = [&](int32_t row, int64_t admission) {
    return rows_[row].chain != nullptr && rows_[row].admission == admission;
  };
  while (!in_flight_.empty() && in_flight_.back().id >= step_id) {
    const Step& step = in_flight_.back();
    published.insert(published.end(), step.published.begin(), step.published.end());
    dropped.insert(dropped.end(), step.dropped.begin(), step.dropped.end());
    for (const Step::Served& served : step.rows) {
      if (!is_there(served.row, served.admission)) continue;
      int64_t start = served.start;
      for (const CacheGroup& group : groups_) {
        // The copy that the plan was to make did not come.
        const bool is_copied = served.is_new && held(served.row)[group.id].num_copied > 0;
        if (is_copied) start = std::min(start, served.start - served.start % group.block_size);
      }
      const auto [limit, is_first] = limits.emplace(served.row, start);
      limit->second = std::min(limit->second, start);
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
  for (const Step::Published& each : published) {
    if (pool_.tenancy(each.id) != each.tenancy) continue;
    int64_t num_right = 0;  // of a row that has left: nobody knows
    if (is_there(each.row, each.admission)) {
      const auto limit = limits.find(each.row);
      const int64_t end = each.first_token + groups_[each.group].block_size;
      if (limit == limits.end() || end <= limit->second) continue;
      num_right = std::max(limit->second, each.first_token);
    }
    add_block(each.id, num_right, &bad);
  }
  // What was published late, or dropped, may have been computed by a step that is still in flight.
  if (!in_flight_.empty()) {
    Step& step = in_flight_.back();
    step.published.insert(step.published.end(), published.begin(), published.end());
    step.dropped.insert(step.dropped.end(), dropped.begin(), dropped.end());
  }
  // Nothing reads any more for these steps.
  last_issued_ = std::min(last_issued_, step_id - 1);
  for (Fence& fence : fences_) fence.step_id = std::min(fence.step_id, last_issued_);
  lift_fences();
  return withdraw(std::move(bad), std::move(limits), /*by_hash=*/false);
}

Recompute Manager::withdraw_ids(const std::vector<BlockId>& ids) {
  Bad bad;
  Limits limits;
  for (BlockId id : ids) {
    bad.blocks.emplace(id, 0);
    add_hashes(id, &bad);
  }
  limit_by_drops(ids, &bad, &limits);
  return withdraw(std::move(bad), std::move(limits), /*by_hash=*/true);
}

// Of a row in `limits`, no more than so many tokens are right. With `by_hash`, rows whose tokens
// run through the content of a bad block are affected whether they hold that very block or not:
// they may have dropped it, copied it, or hit what was computed from it.
Recompute Manager::withdraw(Bad bad, Limits limits, bool by_hash) {
  while (spread(&bad, &limits, by_hash)) {
  }
  std::vector<BlockId> all;
  for (const auto& [id, num_right] : bad.blocks) all.push_back(id);
  std::sort(all.begin(), all.end());  // the order in which they are freed
  if (by_hash) {
    pool_.evict_derived(all.data(), static_cast<int64_t>(all.size()), is_uniform_);
  } else {
    pool_.evict(all.data(), static_cast<int64_t>(all.size()));
  }

  Recompute out;
  std::vector<int32_t> to_restart;
  for (const auto& [row, limit] : limits) {
    if (limit >= rows_[row].num_computed) continue;
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

// Lowers the limits of rows that use bad content, and adds what they have computed behind them.
// Whether anything changed.
bool Manager::spread(Bad* bad, Limits* limits, bool by_hash) const {
  bool changed = false;
  for (int32_t row = 0; row < static_cast<int32_t>(rows_.size()); ++row) {
    if (rows_[row].chain == nullptr) continue;
    const auto known = limits->find(row);
    const int64_t before = known == limits->end() ? kNothing : known->second;
    int64_t limit = std::min(before, limit_by_blocks(row, *bad));
    if (by_hash) limit = std::min(limit, limit_by_hashes(row, *bad));
    if (limit >= rows_[row].num_computed) continue;
    limit = own_limit(row, confirmed_limit(row, limit));
    if (limit < before) {
      (*limits)[row] = limit;
      changed = true;
    }
    changed |= add_computed(row, limit, by_hash, bad);
  }
  return changed;
}

int64_t Manager::limit_by_blocks(int32_t row, const Bad& bad) const {
  int64_t limit = kNothing;
  for (const CacheGroup& group : groups_) {
    const Held& each = held(row)[group.id];
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      const auto found = bad.blocks.find(each.blocks[static_cast<size_t>(b)]);
      if (found == bad.blocks.end()) continue;
      limit =
          std::min(limit, group.is_cacheable() ? std::max(found->second, b * group.block_size) : 0);
    }
  }
  return limit;
}

int64_t Manager::limit_by_hashes(int32_t row, const Bad& bad) const {
  int64_t limit = kNothing;
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  for (size_t i = 0; i < hashes.size() && !bad.hashes.empty(); ++i) {
    const auto found = bad.hashes.find(hashes[i]);
    if (found == bad.hashes.end()) continue;
    const BadHash& what = found->second;
    const auto last =
        static_cast<int64_t>(i) * hash_block_size_;  // where its last hash block begins
    const int64_t of_block = last / what.block_size * what.block_size;
    limit = std::min(limit, std::max(of_block, what.num_right));
  }
  return limit;
}

// Blocks that left a window, and pages that states left, are known for as long as their steps may
// be in flight.
void Manager::limit_by_drops(const std::vector<BlockId>& ids, Bad* bad, Limits* limits) const {
  const std::unordered_set<BlockId> failed(ids.begin(), ids.end());
  for (const Step& step : in_flight_) {
    for (const Step::Dropped& each : step.dropped) {
      if (failed.count(each.id) == 0) continue;
      const Row& row = rows_[each.row];
      if (row.chain == nullptr || row.admission != each.admission) {
        add_left(*each.chain, each.first_token, bad);
        continue;
      }
      const auto [limit, is_first] = limits->emplace(each.row, each.first_token);
      limit->second = std::min(limit->second, each.first_token);
    }
  }
}

// What a row that has left may have computed from token `first_token` on.
void Manager::add_left(const TokenChain& chain, int64_t first_token, Bad* bad) const {
  const std::vector<Hash>& hashes = chain.known_hashes();
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    for (int64_t i = first_token / hash_block_size_; i < static_cast<int64_t>(hashes.size()); ++i) {
      const Hash& hash = hashes[static_cast<size_t>(i)];
      const int64_t num_right = std::max(first_token, i / group.num_hashes * group.block_size);
      const bool is_whole = (i + 1) % group.num_hashes == 0;
      const BlockId id = is_whole ? pool_.find(hash, group.id) : kNullBlock;
      if (id != kNullBlock) add_block(id, num_right, bad);
      if (id != kNullBlock || group.has_parts) {
        add_hash(hash, {num_right, group.block_size}, bad);
      }
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
      if (!group.holds_tokens() || limit / group.block_size >= held(row)[group.id].num_hits) {
        continue;
      }
      limit -= limit % group.block_size;
    }
  }
  return limit;
}

// What the row has computed from token `limit` on. Whether any of it was not known to be bad.
bool Manager::add_computed(int32_t row, int64_t limit, bool by_hash, Bad* bad) const {
  bool changed = false;
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    const Held& each = held(row)[group.id];
    const int64_t size = std::min(static_cast<int64_t>(each.blocks.size()),
                                  ceil_div(rows_[row].num_computed, group.block_size));
    for (int64_t b = std::max(each.num_hits, limit / group.block_size); b < size; ++b) {
      const int64_t num_right = std::max(limit, b * group.block_size);
      const BlockId id = each.blocks[static_cast<size_t>(b)];
      if (id != kNullBlock) {
        changed |= add_block(id, num_right, bad);
        if (by_hash) changed |= add_found(row, group, b, id, num_right, bad);
      } else if (by_hash) {
        changed |= add_dropped(row, group, b, num_right, bad);
      }
    }
  }
  return changed;
}

bool Manager::add_block(BlockId id, int64_t num_right, Bad* bad) {
  const auto [known, is_new] = bad->blocks.emplace(id, num_right);
  if (!is_new && known->second <= num_right) return false;
  known->second = num_right;
  return true;
}

// The hashes under which others may have found what the row computed into this block.
bool Manager::add_found(int32_t row, const CacheGroup& group, int64_t block, BlockId id,
                        int64_t num_right, Bad* bad) const {
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  std::vector<Hash> found = pool_.parts_of(id);
  if (pool_.hash_of(id) != nullptr) found.push_back(*pool_.hash_of(id));
  const int64_t last =
      std::min((block + 1) * group.num_hashes, static_cast<int64_t>(hashes.size()));
  bool changed = false;
  for (int64_t i = num_right / hash_block_size_; i < last && !found.empty(); ++i) {
    const Hash& hash = hashes[static_cast<size_t>(i)];
    if (std::find(found.begin(), found.end(), hash) == found.end()) continue;
    changed |= add_hash(hash, {num_right, group.block_size}, bad);
  }
  return changed;
}

// The same of a block that the row has dropped: as long as it is found; of parts nobody knows.
bool Manager::add_dropped(int32_t row, const CacheGroup& group, int64_t block, int64_t num_right,
                          Bad* bad) const {
  const std::vector<Hash>& hashes = rows_[row].chain->known_hashes();
  const int64_t end = (block + 1) * group.num_hashes;
  bool changed = false;
  for (int64_t i = num_right / hash_block_size_;
       i < std::min(end, static_cast<int64_t>(hashes.size())); ++i) {
    const Hash& hash = hashes[static_cast<size_t>(i)];
    const BlockId id = i + 1 == end ? pool_.find(hash, group.id) : kNullBlock;
    if (id != kNullBlock) changed |= add_block(id, num_right, bad);
    if (id == kNullBlock && !group.has_parts) continue;
    changed |= add_hash(hash, {num_right, group.block_size}, bad);
  }
  return changed;
}

void Manager::add_hashes(BlockId id, Bad* bad) const {
  const int64_t block_size = groups_[pool_.group_of(id)].block_size;
  if (pool_.hash_of(id) != nullptr) add_hash(*pool_.hash_of(id), {0, block_size}, bad);
  for (const Hash& hash : pool_.parts_of(id)) add_hash(hash, {0, block_size}, bad);
}

bool Manager::add_hash(const Hash& hash, const BadHash& what, Bad* bad) {
  const auto [known, is_new] = bad->hashes.emplace(hash, what);
  const BadHash before = known->second;
  known->second.num_right = std::min(before.num_right, what.num_right);
  known->second.block_size = std::max(before.block_size, what.block_size);
  return is_new || known->second.num_right < before.num_right ||
         known->second.block_size > before.block_size;
}

// Whether the row's own blocks hold all that the token at `num_tokens` reads, and the block that it
// goes into.
bool Manager::can_resume(const Held* held, int64_t num_tokens) const {
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
    each.num_hits = std::min(each.num_hits, static_cast<int64_t>(kept));
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
