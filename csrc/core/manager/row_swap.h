// SPDX-License-Identifier: Apache-2.0
// Moves rows from the device to the host, and back.
//
// Invariant: each row is on exactly one tier. A block or page that several rows of a call hold is
// moved only once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/find_block.h"
#include "core/groups/rules/page_rules.h"
#include "core/manager/demand.h"
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/step_request.h"

namespace kvcache {

// Counts the device blocks that rows take when they are swapped in and continue. A page that has a
// twin, which is a cached device block with the same content, takes that block.
class TakenBlocks {
 public:
  TakenBlocks(const BlockPool* pool, const std::unordered_map<BlockId, BlockId>* twins)
      : pool_(pool), twins_(twins) {}

  int64_t num() const { return num_taken_; }
  void add_row(BlockId page) { num_taken_ += num_holders(page)++ == 0; }
  // The row with these pages, all of which were added, gets slots for the tokens [start, stop).
  void grow(const RowBlocks& held, const CacheGroup& group, int64_t start, int64_t stop) {
    const int64_t drop_to = std::min(group.first_needed_block(start), held.size());
    for (int64_t b = held.num_dropped; b < drop_to; ++b) {
      num_taken_ -= --num_holders(held[b]) == 0;
    }
    // If several rows write to a page, the last of them keeps the block.
    const int64_t num_blocks = std::min(ceil_div(stop, group.block_size), group.max_blocks);
    for (int64_t b = start / group.block_size; b < std::min(num_blocks, held.size()); ++b) {
      int64_t& holders = num_holders(held[b]);
      if (holders > 1) --holders, ++num_taken_;
    }
    num_taken_ += std::max<int64_t>(num_blocks - held.size(), 0);
  }

 private:
  // The number of rows that hold the twin or, without one, the block into which the page is loaded.
  int64_t& num_holders(BlockId page) {
    const auto twin = twins_->find(page);
    if (twin == twins_->end()) return of_pages_[page];
    const auto [holders, is_new] = of_twins_.emplace(twin->second, 0);
    if (is_new) holders->second = pool_->ref_count(twin->second);
    return holders->second;
  }

  const BlockPool* pool_;
  const std::unordered_map<BlockId, BlockId>* twins_;
  std::unordered_map<BlockId, int64_t> of_pages_, of_twins_;
  int64_t num_taken_ = 0;
};

class RowSwap {
 public:
  struct Return {
    Demand demand;                          // demand on the device
    std::array<int64_t, kMaxGroups> first;  // first block to load, per group
  };

  // Rows can be moved only with a host tier.
  RowSwap(const RowContext& context, Publisher* publisher, RowRelease* release)
      : c_(context), publisher_(publisher), release_(release) {}

  // See Manager.
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const {
    std::vector<BlockId> all;
    for (int32_t row : rows) {
      const std::vector<BlockId> blocks = c_.rows->written_blocks(row);
      all.insert(all.end(), blocks.begin(), blocks.end());
    }
    std::sort(all.begin(), all.end());
    return std::unique(all.begin(), all.end()) - all.begin();
  }

  // Numbers of device blocks. `alone`: assumes that the device holds nothing else.
  struct BlocksBack {
    int64_t num_taken, alone;
  };
  // Returns the maximum number of free device blocks that are needed if these rows are swapped in
  // together and then, in this order, num_slots[i] more slots are allocated to the i-th row.
  BlocksBack num_blocks_back(const std::vector<int32_t>& rows,
                             const std::vector<int64_t>& num_slots) const {
    return {num_blocks_back(rows, num_slots, cached_twins(rows)),
            num_blocks_back(rows, num_slots, {})};
  }

  // Called outside of steps. Move all rows, or none if they do not all fit. Return (source page,
  // destination page) pairs. Blocks that the device cache still contains do not move back, but are
  // shared by the rows.
  std::optional<std::vector<BlockId>> swap_out(const std::vector<int32_t>& rows) {
    if (num_unique_blocks(rows) > c_.host->pages().num_free()) return std::nullopt;
    c_.plan->begin_direct();
    for (int32_t row : rows) leave(row);
    moved_.clear();
    publisher_->publish_offloaded();
    return c_.plan->direct_pairs();
  }
  std::optional<std::vector<BlockId>> swap_in(const std::vector<int32_t>& rows) {
    Twins twins = cached_twins(rows);
    const std::vector<int64_t> no_slots(rows.size());
    if (num_blocks_back(rows, no_slots, twins) > c_.pool->num_free()) return std::nullopt;
    std::vector<BlockId> shared;
    for (const auto& [page, id] : twins) shared.push_back(id);
    std::sort(shared.begin(), shared.end());
    shared.erase(std::unique(shared.begin(), shared.end()), shared.end());
    c_.plan->begin_direct();
    // Shared blocks are held first, so that loading does not evict any of them.
    const auto num_shared = static_cast<int64_t>(shared.size());
    c_.pool->retain(shared.data(), num_shared);
    c_.pool->notify(Hit{shared, Hit::By::kRequest});
    moved_ = std::move(twins);
    for (int32_t row : rows) load_all(row);
    moved_.clear();
    c_.pool->release(shared.data(), num_shared);
    return c_.plan->direct_pairs();
  }

  // Called within a step before rows are served. Moves the step's rows that fit to the host.
  // Returns which rows have moved. Their results follow the results for running rows.
  std::vector<bool> leave(const StepRequest& request) {
    std::vector<bool> have_left;
    for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
      const int32_t row = request.swap_out_rows[i];
      have_left.push_back(leave(row));
      if (have_left.back()) c_.journal->note_swapped(row, c_.row(row));
    }
    moved_.clear();
    return have_left;
  }
  void answer(const StepRequest& request, const std::vector<bool>& have_left) {
    for (size_t i = 0; i < have_left.size(); ++i) {
      const int32_t row = request.swap_out_rows[i];
      c_.plan->answer(row, have_left[i] ? Status::kServed : Status::kWait, c_.row(row).num_computed,
                      /*num_tokens=*/0);
    }
    moved_.clear();
  }

  // The demand of a row on the host that a step will serve, with the pages that it still reads and
  // new blocks.
  Return return_of(int32_t row, const Span& span, const DemandRules& rules) const {
    const RowBlocks* held_by_group = c_.rows->blocks(row);
    Return back;
    // The blocks remain null here, because dropping host pages frees no device blocks.
    std::vector<RowBlocks> on_device(c_.groups->size());
    int64_t num_onboards = 0, num_blocks = 0;
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = held_by_group[group.id];
      const PageRules::Returning returning = group.rules->returning(group, held, span);
      const int64_t first = returning.first;
      back.first[group.id] = on_device[group.id].num_dropped = first;
      on_device[group.id].resize(held.size());
      if (!returning.is_onboarded) continue;
      for (int64_t b = first; b < held.size(); ++b) {
        num_onboards += !shares_onboard(group, b, span.start, held[b]);
        ++num_blocks;
      }
    }
    // If nothing else is held, the watermark does not apply.
    const bool is_alone = c_.pool->num_free() == c_.pool->num_total();
    const Supply supply{c_.pool->num_free() - num_onboards,
                        is_alone ? 0 : rules.watermark_blocks()};
    back.demand = rules.of(on_device.data(), span, supply, /*skip_for=*/span.start);
    if (back.demand.status == Status::kServed) return back;
    for (const CacheGroup& group : *c_.groups) num_blocks += back.demand[group].num_new;
    back.demand.status = rules.never_or_wait(num_blocks, span);
    return back;
  }
  // Loads the pages of the row for a step, except pages that it no longer reads. A state that
  // continues in a new page is loaded there.
  void move_in(int32_t row, int64_t start, const Return& back) {
    std::vector<BlockId> left;  // pages that the row no longer holds
    for (const CacheGroup& group : *c_.groups) {
      RowBlocks& held = c_.held(row, group);
      for (; held.num_dropped < back.first[group.id]; ++held.num_dropped) {
        left.push_back(std::exchange(held[held.num_dropped], kNullBlock));
      }
      held.state_start = static_cast<int32_t>(start);
      if (back.demand[group].moves) {
        leave_to_growth(&held);
        continue;
      }
      for (int64_t b = held.num_dropped; b < held.size(); ++b) {
        const BlockId page = held[b];
        if (shares_onboard(group, b, start, page)) {
          held[b] = shared_block(page);
          left.push_back(page);
        } else {
          held[b] = new_block(page);
          c_.host->onboard({c_.journal->numbers().num_steps, page, held[b], b, group.id, {}});
        }
      }
    }
    arrive(row, &left);
    c_.journal->note_swapped(row, c_.row(row));
  }

 private:
  struct Departure {                                 // the move of a row that fits on the host
    std::vector<std::pair<BlockId, BlockId>> known;  // blocks with a page of the same content
    std::vector<BlockId> blocks;                     // the other blocks
  };

  // Moves the row to the host, or returns false if it does not fit.
  bool leave(int32_t row) {
    const std::optional<Departure> departure = departure_of(row);
    if (!departure) return false;
    publisher_->publish(row);
    ReleaseFeatures features;
    features.is_swapped_out = true;
    release_->notify_release(row, features);
    move_out(row, *departure);
    return true;
  }
  // Returns nullopt if the host has too few free pages for the blocks of the row that have no copy
  // on the host.
  std::optional<Departure> departure_of(int32_t row) const {
    const BlockPool& pages = c_.host->pages();
    Departure departure;
    std::unordered_set<BlockId> to_hold;  // free pages; two blocks may have the same content
    for (BlockId id : c_.rows->written_blocks(row)) {
      const BlockId page = page_of(id);
      if (page == kNullBlock) {
        departure.blocks.push_back(id);
      } else {
        departure.known.emplace_back(id, page);
        if (pages.ref_count(page) == 0) to_hold.insert(page);
      }
    }
    if (departure.blocks.size() + to_hold.size() > static_cast<size_t>(pages.num_free())) {
      return std::nullopt;
    }
    return departure;
  }
  // Returns the page to which another row has just moved the block, or a cached page with its
  // content, or null.
  BlockId page_of(BlockId id) const {
    const auto moved = moved_.find(id);
    if (moved != moved_.end()) return moved->second;
    const Hash* hash = c_.pool->hash_of(id);
    if (hash == nullptr) return kNullBlock;
    return c_.host->pages().find(*hash, c_.pool->group_of(id), c_.pool->variant_of(id));
  }
  // Releases the row's blocks, and puts host pages in the place of those with content. Blocks of
  // lookahead tokens have none.
  void move_out(int32_t row, const Departure& departure) {
    take_pages(departure, /*is_cached=*/c_.row(row).by_step());  // fills `moved_`
    const std::vector<BlockId> released = c_.rows->tail_first(row, /*with_all=*/true);
    for (const CacheGroup& group : *c_.groups) {
      RowBlocks& held = c_.held(row, group);
      // The journal records the blocks, because the row no longer holds them.
      for (BlockId id : group.rules->leave_device(c_.row(row), group, &held)) {
        c_.note_dropped(row, group, held.num_dropped, id);
      }
      held.resize(std::max(held.num_dropped, c_.rows->num_written(row, group)));
      held.keeps_state = false;
      for (int64_t b = held.num_dropped; b < held.size(); ++b) {
        c_.note_dropped(row, group, b, held[b]);
        held[b] = moved_.at(held[b]);
      }
    }
    c_.note_access(row, released);
    c_.rows->info(row).access = {};
    // The current plan reads these blocks.
    c_.frees->release_or_defer(released, c_.journal->numbers().num_steps);
    c_.rows->disturb(row);
    c_.row(row).state = RowState::kOnHost;
    c_.row(row).num_drafts = 0;
  }
  // Takes a reference to the page of each block, and adds both to `moved_`. Blocks without a page
  // are copied to new pages. With `is_cached`, those with a hash are published later.
  void take_pages(const Departure& departure, bool is_cached) {
    BlockPool& host = c_.host->pages();
    for (const auto& [id, page] : departure.known) {
      host.retain(&page, 1);  // prevents the page from being reallocated
      moved_.emplace(id, page);
    }
    const std::vector<BlockId>& blocks = departure.blocks;
    std::vector<BlockId> pages(blocks.size());
    host.allocate(static_cast<int64_t>(pages.size()), pages.data());
    for (size_t i = 0; i < blocks.size(); ++i) {
      moved_.emplace(blocks[i], pages[i]);
      c_.plan->swap_out(blocks[i], pages[i]);
      const bool is_published_later = is_cached && c_.pool->hash_of(blocks[i]) != nullptr;
      if (is_published_later) c_.host->add_row_page(pages[i], blocks[i]);
    }
    c_.host->mutable_counts()->swapped_out_blocks += static_cast<int64_t>(blocks.size());
  }
  // Whether another row has just loaded the same page and this row does not write to it next.
  bool shares_onboard(const CacheGroup& group, int64_t column, int64_t start, BlockId page) const {
    return moved_.count(page) != 0 && group.rules->may_share_onboard(group, column, start);
  }
  // A state that continues in a new page is loaded there. It is the only page of its row.
  static void leave_to_growth(RowBlocks* held) {
    if (held->num_alive() == 0) return;
    held->host_source = std::exchange(held->blocks.back(), kNullBlock);
    held->num_dropped = held->size();
  }
  // Loads all pages of the row, outside of a step.
  void load_all(int32_t row) {
    std::vector<BlockId> left;
    for (const CacheGroup& group : *c_.groups) {
      RowBlocks& held = c_.held(row, group);
      held.state_start = 0;
      int64_t first_own = held.size(), num_own = 0;  // blocks that no other row has loaded
      for (int64_t b = held.num_dropped; b < held.size(); ++b) {
        const BlockId page = held[b];
        left.push_back(page);
        if (moved_.count(page) != 0) {
          held[b] = shared_block(page);
          continue;
        }
        held[b] = new_block(page);
        c_.plan->swap_in(page, held[b]);
        first_own = std::min(first_own, b);
        ++num_own;
      }
      if (!group.rules->traits.appends) continue;
      const bool is_whole = num_own == held.size() - first_own;
      note_returned(row, group, first_own, is_whole);
    }
    publisher_->refresh(row);
    publisher_->publish(row);
    arrive(row, &left);
  }
  // Return the block of a page with a reference of the row. Another row has just loaded a shared
  // block.
  BlockId shared_block(BlockId page) {
    const BlockId id = moved_.at(page);
    c_.pool->retain(&id, 1);
    return id;
  }
  BlockId new_block(BlockId page) {
    BlockId id;
    c_.pool->allocate(1, &id);
    moved_.emplace(page, id);
    ++c_.host->mutable_counts()->swapped_in_blocks;
    return id;
  }
  // Releases the pages `left` of a row whose blocks are on the device again.
  void arrive(int32_t row, std::vector<BlockId>* left) {
    std::reverse(left->begin(), left->end());
    c_.host->pages().release(left->data(), static_cast<int64_t>(left->size()));
    c_.row(row).state = RowState::kRunning;
    c_.row(row).expect_shared();
  }
  using Twins = std::unordered_map<BlockId, BlockId>;  // host page -> device block
  // Finds the leading host pages with full blocks of computed tokens that are also in the device
  // cache.
  Twins cached_twins(const std::vector<int32_t>& rows) const {
    Twins twins;
    for (int32_t row : rows) {
      const Row& r = c_.row(row);
      if (!r.chain->read_cache() || r.is_stale) continue;
      const int64_t num_known = std::min(publisher_->num_with_kv(row),
                                         r.chain->num_known_hashes() * r.chain->block_size());
      for (const CacheGroup& group : *c_.groups) {
        if (!group.rules->traits.appends) continue;
        const RowBlocks& held = c_.held(row, group);
        const int64_t num_full = std::min(num_known / group.block_size, held.size());
        for (int64_t b = held.num_dropped; b < num_full; ++b) {
          const BlockId id = find_block(*c_.pool, *r.chain, group, b);
          if (id == kNullBlock) break;
          twins.emplace(held[b], id);
        }
      }
    }
    return twins;
  }
  int64_t num_blocks_back(const std::vector<int32_t>& rows, const std::vector<int64_t>& num_slots,
                          const Twins& twins) const {
    TakenBlocks taken(c_.pool, &twins);
    for (int32_t row : rows) {
      for (BlockId page : c_.rows->written_blocks(row)) taken.add_row(page);
    }
    int64_t most = taken.num();
    for (size_t i = 0; i < rows.size(); ++i) {
      if (num_slots[i] == 0) continue;
      const int64_t start = c_.row(rows[i]).num_computed;
      for (const CacheGroup& group : *c_.groups) {
        if (!group.rules->traits.appends) continue;
        taken.grow(c_.held(rows[i], group), group, start, start + num_slots[i]);
      }
      most = std::max(most, taken.num());
    }
    return most;
  }
  // Marks the loaded blocks as unpublished, except the first `num_shared` blocks, until their
  // tokens are known to be computed. `is_whole`: none of them is shared with another row.
  void note_returned(int32_t row, const CacheGroup& group, int64_t num_shared, bool is_whole) {
    const int64_t num_full = c_.row(row).num_computed / group.block_size;
    c_.held(row, group).num_published = is_whole ? std::min(num_shared, num_full) : num_full;
  }

  RowContext c_;
  Publisher* publisher_;
  RowRelease* release_;
  // Source -> destination, of the blocks that the current call has moved and its rows can share.
  std::unordered_map<BlockId, BlockId> moved_;
};

}  // namespace kvcache
