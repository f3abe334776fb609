// SPDX-License-Identifier: Apache-2.0
// Assigns blocks to rows: cache hits, new blocks, and copies of shared blocks.
//
// Invariants: a row holds exactly the blocks that were assigned to it and that it has not released.
// Between steps, no state is about to leave its page.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/rules/effects.h"
#include "core/groups/rules/tokens.h"
#include "core/manager/demand.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/row_context.h"

namespace kvcache {

// A state page that its row releases after all rows of the step have been served.
struct LeftState {
  int32_t row;
  uint8_t group;
  BlockId page;
  int64_t num_tokens;   // tokens that the state summarizes
  int64_t first_token;  // first token that depends on this state
};

class RowGrowth final : public Growth {
 public:
  explicit RowGrowth(const RowContext& context) : c_(context), holders_(context) {}

  // Sets the initial blocks of a request that takes this hit and continues at token `start`. The
  // tokens between the hit and `start` come from another source. Changes only `held`.
  static void set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit,
                      int64_t start) {
    const std::vector<BlockId>& blocks = hit.blocks[group.id];
    held->blocks.assign(blocks.begin(), blocks.end());
    held->num_published = held->size();
    // If a window begins inside the last block of the hit, the block lacks the tokens before the
    // window. In that case, other requests may use only the block's partial hashes after the end of
    // the hit.
    const bool is_whole =
        group.first_hit_token(hit.num_tokens) <= held->num_published * group.block_size;
    held->num_partial =
        static_cast<int32_t>(is_whole ? held->num_published * group.num_hashes
                                      : hit.num_tokens / (group.block_size / group.num_hashes));
    // A group that is not cached takes no blocks from the hit.
    const int64_t first =
        std::max(group.first_hit_block(hit.num_tokens), group.first_needed_block(start));
    held->num_dropped = std::min(first, held->num_published);
    std::fill_n(held->blocks.begin(), held->num_dropped, kNullBlock);
    held->num_hits = static_cast<int32_t>(held->num_published);
    held->state_start = static_cast<int32_t>(hit.num_tokens);
    held->source = hit.sources[group.id];
    held->host_source = kNullBlock;
    held->keeps_state = false;
    const std::vector<PrefixHit::HostBlock>& on_host = hit.on_host[group.id];
    if (start == hit.num_tokens && !on_host.empty()) {
      group.rules->take_host_page(held, on_host.back().page);
    }
  }

  // Adds a reference to each block of the hit that is among the row's initial blocks.
  void take_hit(ServedRow* served, const PrefixHit& hit) {
    for (const CacheGroup& group : *c_.groups) {
      if (!group.is_cached) continue;
      const RowBlocks& held = c_.held(served->row, group);
      const BlockId source = hit.sources[group.id];
      if (source != kNullBlock) {
        c_.pool->retain(&source, 1);  // keeps the block until it has been copied
        c_.pool->notify(Hit{{&source, 1}, Hit::By::kRequest});
        c_.plan->hold(source);
      }
      if (hit.num_host_blocks > 0) {
        take_hit_on_host(served->row, group, hit);
      } else {
        c_.pool->retain(held.blocks.data() + held.num_dropped, held.num_alive());
        note_hits({held.blocks.data() + held.num_dropped, held.num_alive()});
      }
    }
    // At this point all blocks of the hit are held, so onboarding cannot evict any of them.
    if (hit.num_host_blocks > 0) onboard_hit(served, hit);
  }

  // Drops the blocks that the row no longer reads or that it gives up, and allocates its demand.
  void serve(ServedRow* served, const Demand& demand) {
    Takes takes;
    if (demand.gives_up) give_up(served, demand);
    const int64_t num_taken = prepare_all(served, demand, &takes);
    if (num_taken > 0 || served->span.num_accepted > 0) grow_all(served, takes, num_taken);
  }

  // Accepts the drafts of the row's last step. The row continues at span.start.
  void accept_drafts(int32_t row, const Span& span) {
    for (const CacheGroup& group : *c_.groups) {
      group.rules->accept_drafts(this, row, group, span);
    }
    release_left_states();
  }

  // Returns the pages that rows leave in the current step.
  const std::vector<LeftState>& left_states() const { return left_states_; }
  // `engine_copies`: the engine copies from the pages, so they are kept until the last issued step
  // is done.
  void release_left_states(bool engine_copies = false) {
    for (const LeftState& left : left_states_) {
      c_.journal->note_dropped(left.row, c_.row(left.row), left.first_token, left.page);
      c_.note_access(left.row, {&left.page, 1});
      if (engine_copies) {
        c_.frees->release_after({&left.page, 1}, c_.journal->numbers().last_issued);
        continue;
      }
      // The current step copies from the page. Outside of a step, steps that were already issued
      // may read the page.
      const StepNumbers& steps = c_.journal->numbers();
      const int64_t last = c_.plan->is_step() ? steps.num_steps : steps.last_issued;
      c_.frees->release_or_defer({&left.page, 1}, last);
    }
    left_states_.clear();
  }

  // For page rules.
  RowBlocks& held(int32_t row, const CacheGroup& group) const override {
    return c_.held(row, group);
  }
  bool is_shared(BlockId id) const override { return holders_.is_shared(id); }
  bool is_step() const override { return c_.plan->is_step(); }
  void replace(int32_t row, const CacheGroup& group, int64_t column, BlockId id) override {
    c_.plan->replace(row, group.id, column, id);
  }
  void copy(BlockId source, BlockId target) override { c_.plan->copy(source, target); }
  void zero(BlockId page) override { c_.plan->zero(page); }
  void onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
               BlockId block, bool is_hit) override {
    const std::shared_ptr<TokenChain>& chain = c_.row(served->row).chain;
    c_.host->onboard(
        {c_.journal->numbers().num_steps, page, block, column, group.id, is_hit ? chain : nullptr});
    served->depends_from(column * group.block_size);
  }
  void replace_shared(ServedRow* served, const CacheGroup& group, int64_t column, BlockId own,
                      bool copies) override {
    const int32_t row = served->row;
    RowBlocks& held = this->held(row, group);
    const BlockId shared = std::exchange(held[column], own);
    c_.note_access(row, {&shared, 1});
    held.lower_hits(column);
    if (copies) {
      note_dropped(row, group, column, shared);
      held.state_start = static_cast<int32_t>(served->span.start);
      served->depends_from(column * group.block_size);
      c_.plan->copy(shared, own);
      if (c_.plan->is_step()) {
        c_.plan->hold(shared);  // keeps the block until the copy is done
        return;
      }
    }
    c_.frees->release_or_defer({&shared, 1});
  }
  void copy_source(ServedRow* served, const CacheGroup& group, BlockId own) override {
    RowBlocks& held = this->held(served->row, group);
    const int64_t column = served->num_before[group.id];
    c_.plan->copy(held.source, own);
    note_dropped(served->row, group, column, held.source);
    served->depends_from(column * group.block_size);
    held.source = kNullBlock;
  }
  void note_dropped(int32_t row, const CacheGroup& group, int64_t column, BlockId id) override {
    c_.note_dropped(row, group, column, id);
  }
  void release(int32_t row, const std::vector<BlockId>& ids) override { c_.release(row, ids); }
  void leave(int32_t row, const CacheGroup& group, int64_t column, BlockId page,
             int64_t num_tokens) override {
    left_states_.push_back(
        {row, group.id, page, num_tokens, c_.rows->first_token(row, group, column)});
  }
  void evict(BlockId id) override { c_.pool->evict(&id, 1); }

 private:
  using Takes = std::array<PageRules::Take, kMaxGroups>;

  // Drops the blocks that the row no longer needs. Returns the number of blocks to take.
  int64_t prepare_all(ServedRow* served, const Demand& demand, Takes* takes) {
    const RowBlocks* held_by_group = c_.rows->blocks(served->row);
    int64_t num_taken = 0, num_spare = demand.num_spare;
    for (const CacheGroup& group : *c_.groups) {
      const GroupDemand& needs = demand[group];
      const RowBlocks& held = held_by_group[group.id];
      PageRules::Take& take = (*takes)[group.id];
      served->num_before[group.id] = held.size();
      // A step usually changes only a few groups of a row. The rules of the other groups are not
      // called.
      if (!needs.changes(held)) {
        take = {0, 0, false};
        continue;
      }
      // Inlined for token rules, because `prepare` usually only returns the numbers of new blocks.
      // `grow` does more work than a virtual call.
      take = with_rules(group, [&](const auto& rules) {
        return rules.prepare(this, *served, group, needs, &num_spare);
      });
      num_taken += take.num_new + take.num_shared;
    }
    return num_taken;
  }
  // Allocates the blocks to take and adds them to the row.
  void grow_all(ServedRow* served, const Takes& takes, int64_t num_taken) {
    c_.settle_access(served->row);
    taken_.resize(static_cast<size_t>(num_taken));
    c_.pool->allocate(num_taken, taken_.data());
    c_.plan->give(taken_.data(), num_taken);
    const BlockId* next = taken_.data();
    for (const CacheGroup& group : *c_.groups) {
      next = group.rules->grow(this, served, group, takes[group.id], next);
    }
  }
  void note_hits(const Blocks& blocks) {
    if (blocks.n == 0) return;
    c_.pool->notify(Hit{blocks, Hit::By::kRequest});
  }
  void take_hit_on_host(int32_t row, const CacheGroup& group, const PrefixHit& hit) {
    const RowBlocks& held = c_.held(row, group);
    std::vector<BlockId> ids, pages;
    for (int64_t b = held.num_dropped; b < held.size(); ++b) {
      if (held[b] != kNullBlock) ids.push_back(held[b]);
    }
    for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
      if (on_host.column >= held.num_dropped) pages.push_back(on_host.page);
    }
    if (held.host_source != kNullBlock) pages.push_back(held.host_source);
    c_.pool->retain(ids.data(), static_cast<int64_t>(ids.size()));
    note_hits(ids);
    c_.host->pages().retain(pages.data(), static_cast<int64_t>(pages.size()));
    c_.host->pages().notify(Hit{pages, Hit::By::kRequest});
  }
  // Allocates and loads blocks for the part of a hit that is on the host.
  void onboard_hit(ServedRow* served, const PrefixHit& hit) {
    for (const CacheGroup& group : *c_.groups) {
      RowBlocks& held = c_.held(served->row, group);
      for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
        if (on_host.column < held.num_dropped) continue;
        BlockId& id = held[on_host.column];
        c_.pool->allocate(1, &id);
        onboard(served, group, on_host.column, on_host.page, id, /*is_hit=*/true);
        ++c_.host->mutable_counts()->loaded_blocks;
      }
    }
  }
  // Afterwards, the worker's table of the row has too many entries, so the whole table is sent
  // again.
  void give_up(ServedRow* served, const Demand& demand) {
    c_.resend(served->row);
    for (const CacheGroup& group : *c_.groups) {
      group.rules->give_up(this, served, group, demand[group]);
      const int64_t size = this->held(served->row, group).size();
      c_.release_tail(served->row, group, size - demand[group].num_surplus);
    }
    served->span.num_accepted = 0;  // already accepted
  }

  RowContext c_;
  BlockHolders holders_;
  std::vector<LeftState> left_states_;
  std::vector<BlockId> taken_;  // scratch: the blocks of one row
};

}  // namespace kvcache
