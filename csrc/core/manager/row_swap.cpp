// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_swap.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/groups/rules/page_rules.h"
namespace kvcache {

int64_t RowSwap::num_unique_blocks(const std::vector<int32_t>& rows) const {
  std::vector<BlockId> all;
  for (int32_t row : rows) {
    const std::vector<BlockId> blocks = c_.rows->written_blocks(row);
    all.insert(all.end(), blocks.begin(), blocks.end());
  }
  std::sort(all.begin(), all.end());
  return std::unique(all.begin(), all.end()) - all.begin();
}

RowSwap::BlocksBack RowSwap::num_blocks_back(const std::vector<int32_t>& rows,
                                             const std::vector<int64_t>& num_slots) const {
  return {num_blocks_back(rows, num_slots, cached_twins(rows)),
          num_blocks_back(rows, num_slots, {})};
}

// Finds the leading host pages with full blocks of computed tokens that are also in the device
// cache.
RowSwap::Twins RowSwap::cached_twins(const std::vector<int32_t>& rows) const {
  Twins twins;
  for (int32_t row : rows) {
    const Row& r = (*c_.rows)[row];
    if (!r.chain->read_cache() || r.is_stale) continue;
    const HashList& hashes = r.chain->known_hashes();
    const int64_t num_known = std::min(publisher_->num_with_kv(row),
                                       static_cast<int64_t>(hashes.size()) * r.chain->block_size());
    for (const CacheGroup& group : *c_.groups) {
      if (!group.rules->traits.appends) continue;
      const RowBlocks& each = c_.rows->blocks(row)[group.id];
      const int64_t num_full = std::min(num_known / group.block_size, each.size());
      for (int64_t b = each.num_dropped; b < num_full; ++b) {
        const auto last = static_cast<size_t>((b + 1) * group.num_hashes - 1);
        const uint64_t variant = r.chain->variant(static_cast<int64_t>(last));
        const BlockId id = c_.pool->find(hashes[last], group.id, variant);
        if (id == kNullBlock) break;
        twins.emplace(each[b], id);
      }
    }
  }
  return twins;
}

int64_t RowSwap::num_blocks_back(const std::vector<int32_t>& rows,
                                 const std::vector<int64_t>& num_slots, const Twins& twins) const {
  // Number of rows that hold each shared block (positive keys) and each page to move (negative
  // keys).
  std::unordered_map<int64_t, int64_t> num_holders;
  int64_t num_taken = 0, most = 0;
  const auto key_of = [&](BlockId page) -> int64_t {
    const auto twin = twins.find(page);
    return twin == twins.end() ? -page : twin->second;
  };
  for (int32_t row : rows) {
    for (BlockId page : c_.rows->written_blocks(row)) {
      const int64_t key = key_of(page);
      const auto [holders, is_new] = num_holders.emplace(key, 0);
      if (is_new && key > 0) holders->second = c_.pool->ref_count(static_cast<BlockId>(key));
      num_taken += holders->second++ == 0;
    }
  }
  most = num_taken;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (num_slots[i] == 0) continue;
    const int64_t start = (*c_.rows)[rows[i]].num_computed, stop = start + num_slots[i];
    for (const CacheGroup& group : *c_.groups) {
      if (!group.rules->traits.appends) continue;
      const RowBlocks& each = c_.rows->blocks(rows[i])[group.id];
      const int64_t drop_to = std::min(group.first_needed_block(start), each.size());
      for (int64_t b = each.num_dropped; b < drop_to; ++b) {
        num_taken -= --num_holders[key_of(each[b])] == 0;
      }
      // If several rows write to a page, the last of them keeps the block.
      const int64_t num_blocks = std::min(ceil_div(stop, group.block_size), group.max_blocks);
      for (int64_t b = start / group.block_size; b < std::min(num_blocks, each.size()); ++b) {
        int64_t& holders = num_holders[key_of(each[b])];
        if (holders > 1) --holders, ++num_taken;
      }
      num_taken += std::max<int64_t>(num_blocks - each.size(), 0);
    }
    most = std::max(most, num_taken);
  }
  return most;
}

std::optional<std::vector<BlockId>> RowSwap::swap_out(const std::vector<int32_t>& rows) {
  if (num_unique_blocks(rows) > c_.host->pages().num_free()) return std::nullopt;
  c_.plan->begin_direct();
  begin();
  for (int32_t row : rows) leave(row);
  publisher_->publish_offloaded();
  return c_.plan->direct_pairs();
}

std::optional<std::vector<BlockId>> RowSwap::swap_in(const std::vector<int32_t>& rows) {
  Twins twins = cached_twins(rows);
  std::vector<BlockId> shared;
  for (const auto& [page, id] : twins) shared.push_back(id);
  std::sort(shared.begin(), shared.end());
  shared.erase(std::unique(shared.begin(), shared.end()), shared.end());
  int64_t num_taken = num_unique_blocks(rows) - static_cast<int64_t>(twins.size());
  for (BlockId id : shared) num_taken += c_.pool->ref_count(id) == 0;
  if (num_taken > c_.pool->num_free()) return std::nullopt;
  c_.plan->begin_direct();
  begin();
  // Shared blocks are held first, so that loading does not evict any of them.
  const auto num_shared = static_cast<int64_t>(shared.size());
  c_.pool->retain(shared.data(), num_shared);
  c_.pool->notify(Hit{{shared.data(), num_shared}, Hit::By::kRequest});
  moved_ = std::move(twins);
  for (int32_t row : rows) move_in(row, /*start=*/0, nullptr);
  c_.pool->release(shared.data(), num_shared);
  return c_.plan->direct_pairs();
}

std::vector<bool> RowSwap::leave(const StepRequest& request) {
  std::vector<bool> have_left;
  begin();
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    have_left.push_back(leave(row));
    if (have_left.back()) c_.journal->note_swapped(row, (*c_.rows)[row]);
  }
  begin();
  return have_left;
}

void RowSwap::answer(const StepRequest& request, const std::vector<bool>& have_left) {
  for (size_t i = 0; i < have_left.size(); ++i) {
    const int32_t row = request.swap_out_rows[i];
    c_.plan->answer(row, have_left[i] ? Status::kServed : Status::kWait,
                    (*c_.rows)[row].num_computed, /*num_tokens=*/0);
  }
  begin();  // rows that move later belong to another step
}

// Moves the row to the host, or returns false if it does not fit.
bool RowSwap::leave(int32_t row) {
  const std::optional<Departure> departure = departure_of(row);
  if (!departure) return false;
  publisher_->publish(row);
  ReleaseFeatures features;
  features.is_swapped_out = true;
  release_->notify_release(row, features);
  move_out(row, *departure);
  return true;
}

// Returns nullopt if the host has too few free pages for the blocks of the row that have no copy on
// the host.
std::optional<RowSwap::Departure> RowSwap::departure_of(int32_t row) const {
  const BlockPool& pages = c_.host->pages();
  Departure departure{{}, 0};
  std::unordered_set<BlockId> to_hold;
  int64_t num_free = pages.num_free();
  for (BlockId id : c_.rows->written_blocks(row)) {
    if (moved_.count(id) != 0) continue;
    const Hash* hash = c_.pool->hash_of(id);
    const BlockId page = hash == nullptr
                             ? kNullBlock
                             : pages.find(*hash, c_.pool->group_of(id), c_.pool->variant_of(id));
    if (page == kNullBlock) {
      ++departure.num_new;
    } else {
      departure.known.insert(departure.known.end(), {id, page});
      // Two blocks may have the same content.
      num_free -= pages.ref_count(page) == 0 && to_hold.insert(page).second;
    }
  }
  if (departure.num_new > num_free) return std::nullopt;
  return departure;
}

// Lookahead blocks have no content, so they are only released.
void RowSwap::move_out(int32_t row, const Departure& departure) {
  BlockPool& host = c_.host->pages();
  const bool is_cached = (*c_.rows)[row].by_step();
  std::unordered_set<BlockId> taken;  // blocks whose pages the row already references
  for (size_t i = 0; i < departure.known.size(); i += 2) {
    const BlockId id = departure.known[i], page = departure.known[i + 1];
    host.retain(&page, 1);  // prevents the page from being reallocated
    moved_.emplace(id, page);
    taken.insert(id);
  }
  std::vector<BlockId> pages(static_cast<size_t>(departure.num_new));
  host.allocate(departure.num_new, pages.data());
  const BlockId* next = pages.data();
  const std::vector<BlockId> released = c_.rows->tail_first(row, /*with_all=*/true);
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = c_.rows->blocks(row)[group.id];
    for (BlockId id : group.rules->leave_device((*c_.rows)[row], group, &each)) {
      c_.note_dropped(row, group, each.num_dropped, id);  // the row no longer holds the block
    }
    each.resize(std::max(each.num_dropped, c_.rows->num_written(row, group)));
    each.keeps_state = false;
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      const BlockId id = each[b];
      // Recorded because the row no longer holds the block.
      c_.note_dropped(row, group, b, id);
      const auto [to, is_first] = moved_.emplace(id, kNullBlock);
      if (is_first) {
        to->second = *next++;
        c_.plan->swap_out(id, to->second);
        if (is_cached && c_.pool->hash_of(id) != nullptr) c_.host->add_row_page(to->second, id);
      } else if (taken.count(id) == 0) {
        host.retain(&to->second, 1);
      }
      each[b] = to->second;
    }
  }
  c_.host->mutable_counts()->swapped_out_blocks += departure.num_new;
  c_.note_access(row, released.data(), static_cast<int64_t>(released.size()));
  c_.rows->info(row).access = {};
  // The current plan reads these blocks.
  c_.frees->release_or_defer(released.data(), static_cast<int64_t>(released.size()),
                             c_.journal->numbers().num_steps);
  c_.rows->disturb(row);
  (*c_.rows)[row].state = RowState::kOnHost;
  (*c_.rows)[row].num_drafts = 0;
}

RowSwap::Return RowSwap::return_of(int32_t row, const Span& span, const DemandRules& rules) const {
  const RowBlocks* held = c_.rows->blocks(row);
  Return back;
  // The blocks remain null here, because dropping host pages frees no device blocks.
  std::vector<RowBlocks> on_device(c_.groups->size());
  int64_t num_onboards = 0, num_blocks = 0;
  for (const CacheGroup& group : *c_.groups) {
    const RowBlocks& each = held[group.id];
    const PageRules::Returning returning = group.rules->returning(group, each, span);
    const int64_t first = returning.first;
    back.first[group.id] = on_device[group.id].num_dropped = first;
    on_device[group.id].resize(each.size());
    for (int64_t b = first; b < each.size() && returning.is_onboarded; ++b) {
      num_onboards += !shares_onboard(group, b, span.start, each[b]);
      ++num_blocks;
    }
  }
  // If nothing else is held, the watermark does not apply.
  const bool is_alone = c_.pool->num_free() == c_.pool->num_total();
  const Supply supply{c_.pool->num_free() - num_onboards, is_alone ? 0 : rules.watermark_blocks()};
  back.demand = rules.of(on_device.data(), span, supply, /*skip_for=*/span.start);
  if (back.demand.status == Status::kServed) return back;
  for (const CacheGroup& group : *c_.groups) num_blocks += back.demand[group].num_new;
  back.demand.status = rules.never_or_wait(num_blocks, span);
  return back;
}

// Whether another row has just loaded the same page and this row does not write to it next.
bool RowSwap::shares_onboard(const CacheGroup& group, int64_t column, int64_t start,
                             BlockId page) const {
  return moved_.count(page) != 0 && group.rules->may_share_onboard(group, column, start);
}

void RowSwap::move_in(int32_t row, int64_t start, const Return& back) {
  move_in(row, start, &back);
  c_.journal->note_swapped(row, (*c_.rows)[row]);
}

// Without `back`, loads all pages of the row.
void RowSwap::move_in(int32_t row, int64_t start, const Return* back) {
  Row& r = (*c_.rows)[row];
  std::vector<BlockId> left;
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = c_.rows->blocks(row)[group.id];
    const bool moves = back != nullptr && back->demand[group].moves;
    for (; back != nullptr && each.num_dropped < back->first[group.id]; ++each.num_dropped) {
      left.push_back(std::exchange(each[each.num_dropped], kNullBlock));
    }
    each.state_start = static_cast<int32_t>(start);
    int64_t first_own = each.size(), num_own = 0;  // blocks that no other row has loaded
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      BlockId& id = each[b];
      const BlockId page = id;
      if (moves) {  // a row with states has only this page
        each.host_source = page;
        id = kNullBlock;
        each.num_dropped = b + 1;
        continue;
      }
      const auto known = moved_.find(page);
      if (known != moved_.end() && (back == nullptr || shares_onboard(group, b, start, page))) {
        id = known->second;
        c_.pool->retain(&id, 1);
        left.push_back(page);
        continue;
      }
      c_.pool->allocate(1, &id);
      moved_.emplace(page, id);
      first_own = std::min(first_own, b);
      ++num_own;
      ++c_.host->mutable_counts()->swapped_in_blocks;
      if (back != nullptr) {
        c_.host->onboard({c_.journal->numbers().num_steps, page, id, b, group.id, {}});
      } else {
        c_.plan->swap_in(page, id);
        left.push_back(page);
      }
    }
    if (back == nullptr && group.rules->traits.appends) {
      note_returned(row, group, first_own, num_own == each.size() - first_own);
    }
  }
  if (back == nullptr) {  // loads all groups
    publisher_->refresh(row);
    publisher_->publish(row);
  }
  std::reverse(left.begin(), left.end());
  c_.host->pages().release(left.data(), static_cast<int64_t>(left.size()));
  r.state = RowState::kRunning;
  r.expect_shared();
}

// Marks the blocks that were loaded outside of a step as unpublished, except the first `num_shared`
// blocks. They are published once their tokens are known to be computed. `is_whole`: none of them
// is shared with another row.
void RowSwap::note_returned(int32_t row, const CacheGroup& group, int64_t num_shared,
                            bool is_whole) {
  const int64_t num_full = (*c_.rows)[row].num_computed / group.block_size;
  c_.rows->blocks(row)[group.id].num_published =
      is_whole ? std::min(num_shared, num_full) : num_full;
}

}  // namespace kvcache
