#include "core/manager/row_swap.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

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

// Pages of rows on the host with full blocks of computed tokens, from their first one on, that the
// device's cache has too.
RowSwap::Twins RowSwap::cached_twins(const std::vector<int32_t>& rows) const {
  Twins twins;
  for (int32_t row : rows) {
    const Row& r = (*c_.rows)[row];
    if (!r.chain->read_cache() || r.is_stale) continue;
    const std::vector<Hash>& hashes = r.chain->known_hashes();
    const int64_t num_known = std::min(publisher_->num_with_kv(row),
                                       static_cast<int64_t>(hashes.size()) * r.chain->block_size());
    for (const CacheGroup& group : *c_.groups) {
      if (!group.holds_tokens()) continue;
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
  // Of each block that is shared, and of each page that moves (below 0).
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
      if (!group.holds_tokens()) continue;
      const RowBlocks& each = c_.rows->blocks(rows[i])[group.id];
      const int64_t drop_to = std::min(group.first_needed_block(start), each.size());
      for (int64_t b = each.num_dropped; b < drop_to; ++b) {
        num_taken -= --num_holders[key_of(each[b])] == 0;
      }
      // Of a page that several write, the last one keeps the block.
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
  // Held first: what moves evicts nothing of it.
  const auto num_shared = static_cast<int64_t>(shared.size());
  c_.pool->retain(shared.data(), num_shared);
  c_.pool->hit(shared.data(), num_shared);
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
  begin();  // no row moves any more: the next one is another step's
}

// Moves the row to the host. Whether it fits there.
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

// None where the row's blocks that are not there yet do not fit on the host.
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
      // Two blocks may hold the same.
      num_free -= pages.ref_count(page) == 0 && to_hold.insert(page).second;
    }
  }
  if (departure.num_new > num_free) return std::nullopt;
  return departure;
}

// Lookahead blocks hold nothing: they are released.
void RowSwap::move_out(int32_t row, const Departure& departure) {
  BlockPool& host = c_.host->pages();
  std::unordered_set<BlockId> taken;  // whose reference is the row's already
  for (size_t i = 0; i < departure.known.size(); i += 2) {
    const BlockId id = departure.known[i], page = departure.known[i + 1];
    host.retain(&page, 1);  // nothing new may take its place
    moved_.emplace(id, page);
    taken.insert(id);
  }
  std::vector<BlockId> pages(static_cast<size_t>(departure.num_new));
  host.allocate(departure.num_new, pages.data());
  const BlockId* next = pages.data();
  const std::vector<BlockId> released = c_.rows->tail_first(row, /*with_encoder=*/true);
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = c_.rows->blocks(row)[group.id];
    if (group.holds_state()) keep_state_alone(row, group);
    each.resize(std::max(each.num_dropped, c_.rows->num_written(row, group)));
    each.keeps_state = false;
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      const BlockId id = each[b];
      // Had, and not kept.
      c_.note_dropped(row, group, b, id);
      const auto [to, is_first] = moved_.emplace(id, kNullBlock);
      if (is_first) {
        to->second = *next++;
        c_.plan->swap_out(id, to->second);
        if (caches_rows_ && c_.pool->hash_of(id) != nullptr) c_.host->add_row_page(to->second, id);
      } else if (taken.count(id) == 0) {
        host.retain(&to->second, 1);
      }
      each[b] = to->second;
    }
  }
  c_.host->mutable_counts()->swapped_out_blocks += departure.num_new;
  c_.note_access(row, released.data(), static_cast<int64_t>(released.size()));
  c_.rows->info(row).access = {};
  // The plan that is being made reads them.
  c_.frees->release_or_defer(released.data(), static_cast<int64_t>(released.size()),
                             c_.journal->numbers().num_steps);
  (*c_.rows)[row].on_host = true;
  (*c_.rows)[row].num_drafts = 0;
}

// The pages for drafts do not leave with the row: their tokens count as accepted.
void RowSwap::keep_state_alone(int32_t row, const CacheGroup& group) const {
  const Row& r = (*c_.rows)[row];
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  if (each.num_alive() <= 1) return;
  const int64_t first = each.num_dropped;
  for (int64_t b = first; b < first + r.num_drafts; ++b) {
    c_.note_dropped(row, group, first, each[b]);  // had, and not kept
  }
  each.set_pages((r.num_computed - 1) / group.block_size, each[first + r.num_drafts], {});
}

RowSwap::Return RowSwap::return_of(int32_t row, const Span& span, const DemandRules& rules) const {
  const RowBlocks* held = c_.rows->blocks(row);
  Return back;
  // Blocks on the host that leave a window free nothing on the device.
  std::vector<RowBlocks> on_device(c_.groups->size());
  int64_t num_onboards = 0, num_blocks = 0;
  for (const CacheGroup& group : *c_.groups) {
    const RowBlocks& each = held[group.id];
    int64_t first = each.num_dropped;
    if (group.holds_tokens()) {
      first = std::max(first, std::min(group.first_needed_block(span.start), each.size()));
    }
    back.first[group.id] = on_device[group.id].num_dropped = first;
    on_device[group.id].resize(each.size());
    // A state that moves on is onboarded into its new page.
    const bool moves =
        group.holds_state() && span.start > 0 && span.moves_state(group, /*has_page=*/true);
    for (int64_t b = first; b < each.size() && !moves; ++b) {
      num_onboards += !shares_onboard(group, b, span.start, each[b]);
      ++num_blocks;
    }
  }
  // Where nothing else is held, there is nothing to leave free for.
  const bool is_alone = c_.pool->num_free() == c_.pool->num_total();
  const Supply supply{c_.pool->num_free() - num_onboards, is_alone ? 0 : rules.watermark_blocks()};
  back.demand = rules.of(on_device.data(), span, supply, /*is_new=*/true, /*may_share=*/false);
  if (back.demand.status == Status::kServed) return back;
  for (const CacheGroup& group : *c_.groups) num_blocks += back.demand[group].num_new;
  back.demand.status = rules.never_or_wait(num_blocks);
  return back;
}

// Whether another row has just brought back the same page, and this one does not write it at once.
bool RowSwap::shares_onboard(const CacheGroup& group, int64_t column, int64_t start,
                             BlockId page) const {
  if (moved_.count(page) == 0 || group.holds_state() || group.is_circular()) return false;
  return group.holds_encoder() || (column + 1) * group.block_size <= start;
}

void RowSwap::move_in(int32_t row, int64_t start, const Return& back) {
  move_in(row, start, &back);
  c_.journal->note_swapped(row, (*c_.rows)[row]);
}

// Without `back` all of its pages.
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
    int64_t first_own = each.size(), num_own = 0;  // blocks that no other row has brought back
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      BlockId& id = each[b];
      const BlockId page = id;
      if (moves) {  // alone: a state is one page
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
    if (back == nullptr && group.holds_tokens()) {
      note_returned(row, group, first_own, num_own == each.size() - first_own);
    }
  }
  if (back == nullptr) {  // all groups are back
    publisher_->refresh(row);
    publisher_->publish(row);
  }
  std::reverse(left.begin(), left.end());
  c_.host->pages().release(left.data(), static_cast<int64_t>(left.size()));
  r.on_host = false;
  r.may_share = r.has_forked;
}

// The blocks that came back by a call, behind `num_shared` that are others' too, are to be found
// again once their tokens are known to be computed; `is_whole`: none of those behind is another's.
void RowSwap::note_returned(int32_t row, const CacheGroup& group, int64_t num_shared,
                            bool is_whole) {
  const int64_t num_full = (*c_.rows)[row].num_computed / group.block_size;
  c_.rows->blocks(row)[group.id].num_published =
      is_whole ? std::min(num_shared, num_full) : num_full;
}

}  // namespace kvcache
