// SPDX-License-Identifier: Apache-2.0
// Processes reports: completes steps, or restores rows and caches to valid content after a step was
// aborted or content was found to be invalid.
//
// The class has no state. Invariant: a row that recomputes keeps no invalid token, and no cache
// contains a block computed from an invalid token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/groups/find_block.h"
#include "core/manager/invalidation.h"
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/row_server.h"
#include "core/manager/step_plan.h"

namespace kvcache {

class Recovery {
 public:
  Recovery(const RowContext& context, Publisher* publisher, RowRelease* release, RowServer* server)
      : c_(context), publisher_(publisher), release_(release), server_(server) {}

  // See Manager. `invalidate` also accepts host pages.
  Recompute report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                   const std::vector<BlockId>& failed_on_host) {
    Recompute all;
    if (!completed) all = abort_from(step_id);
    if (!failed.empty() || !failed_on_host.empty()) {
      // Runs before the step is marked as done, because its journal records which rows used and
      // dropped these blocks.
      const Recompute more = invalidate(failed, failed_on_host);
      all.rows.insert(all.rows.end(), more.rows.begin(), more.rows.end());
      all.num_computed_tokens.insert(all.num_computed_tokens.end(),
                                     more.num_computed_tokens.begin(),
                                     more.num_computed_tokens.end());
    }
    if (completed) complete_to(step_id);
    return all;
  }
  Recompute invalidate(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages) {
    // Without caching, equal hashes do not identify shared content; they may come from another
    // manager.
    Invalidation invalid(c_, /*by_hash=*/publisher_->is_enabled());
    invalid.add_failed(blocks, pages);
    invalid.spread();
    const InvalidChains chains = invalid.chains();
    release_->note_forgotten();
    c_.pool->evict_derived(chains, are_uniform(*c_.groups));
    if (c_.host != nullptr) c_.host->pages().evict_derived(chains, are_uniform(*c_.groups));
    return recompute(invalid.limits());
  }

  // Ends the wait of a receiving row. At most num_tokens of its tokens have arrived, and the row
  // continues after them.
  void receive(int32_t row, int64_t num_tokens) {
    Row& r = c_.row(row);
    int64_t& num_valid = c_.rows->info(row).num_valid;
    num_tokens = std::min(num_tokens, std::exchange(num_valid, kUnbounded));
    // The row keeps no block that is filled only in part, because its other slots may contain
    // anything.
    if (std::exchange(c_.rows->info(row).was_aborted, false)) num_tokens = in_blocks(num_tokens);
    r.state = RowState::kRunning;
    if (num_tokens < r.num_computed) recompute({{row, num_tokens}}, /*most_had=*/num_tokens);
    publisher_->refresh(row);
    publisher_->publish(row);
  }

  // Adds the pages that aborted plans gave to rows, and that the rows still hold without content,
  // to the current plan, because the aborted plans may not have reached the worker.
  void give_again() {
    std::unordered_set<BlockId> listed;  // forks share pages
    for (const StepJournal::Given& each : given_) {
      const bool is_held = c_.pool->ref_count(each.id) > 0;
      if (!is_held || c_.pool->generation(each.id) != each.generation) continue;
      if (!listed.insert(each.id).second) continue;
      c_.plan->give(&each.id, 1);
      c_.journal->note_given(each);
    }
    given_.clear();
  }

  // Called before these device blocks lose their hashes, so that lookups no longer find them.
  // Records in the journal which of them belong to freed rows whose steps may be in flight.
  void note_evicted(const std::function<bool(BlockId)>& is_evicted) {
    release_->note_forgotten();
    for (const StepJournal::Step& step : c_.journal->in_flight()) {
      for (const StepJournal::Left& left : step.left) note_evicted_of(left, is_evicted);
    }
  }
  // Removes the hashes of both tiers.
  void clear_cache() {
    if (c_.rows->num_in_use() > 0) release_->note_forgotten();
    c_.pool->clear();
    if (c_.host != nullptr) c_.host->clear();
  }
  // Removes the hashes of both tiers, and prevents rows from publishing the content that they hold.
  void start_epoch() {
    clear_cache();
    for (int32_t row : c_.rows->in_use()) c_.row(row).stop_publishing();
  }
  // The same for the content of one adapter (ExtraKeys::adapter). Rows that hold such content
  // neither read nor write the cache any more, even after a restart.
  void forget_adapter(uint32_t adapter) {
    note_evicted([&](BlockId id) { return c_.pool->adapter_of(id) == adapter; });
    c_.pool->evict_adapter(adapter);
    if (c_.host != nullptr) c_.host->pages().evict_adapter(adapter);
    for (int32_t row : c_.rows->in_use()) {
      Row& r = c_.row(row);
      if (r.chain->extra_keys().adapter() != adapter) continue;
      r.chain = r.chain->uncached();
      c_.rows->info(row).reads = false;
      r.stop_publishing();
    }
  }

 private:
  // Returns the largest number up to num_tokens that fills whole blocks in all groups.
  int64_t in_blocks(int64_t num_tokens) const {
    int64_t unit = 1;
    for (const CacheGroup& group : *c_.groups) {
      if (group.rules->traits.appends) unit = std::lcm(unit, group.block_size);
    }
    return num_tokens - num_tokens % unit;
  }
  // Undoes this step and all later ones, unless the step was already aborted. Each row returns to
  // its state before them, and their results are removed from the device cache.
  Recompute abort_from(int64_t step_id) {
    const std::vector<StepJournal::Step> aborted = c_.journal->abort_from(step_id);
    if (aborted.empty()) return {};
    Invalidation invalid(c_, /*by_hash=*/false);
    LeftRows left;
    for (const StepJournal::Step& step : aborted) {
      undo(step, &invalid);
      for (const StepJournal::Left& each : step.left) left.emplace(each.admission, each);
    }
    for (const StepJournal::Step& step : aborted) {
      for (const StepJournal::Published& each : step.published) add_published(each, left, &invalid);
    }
    // From here on, no block waits for the aborted steps.
    c_.frees->forget_aborted();
    if (c_.host != nullptr) {
      c_.host->finish(c_.host->take_aborted(c_.journal->numbers().last_issued));
    }
    c_.frees->release_completed();
    invalid.spread();
    const std::vector<BlockId> blocks = invalid.blocks();
    release_->note_forgotten();
    c_.pool->evict(blocks.data(), static_cast<int64_t>(blocks.size()));
    Recompute out = recompute(invalid.limits());
    for (const StepJournal::Step& step : aborted) note_given(step);
    return out;
  }
  void complete_to(int64_t step_id) {
    c_.journal->complete_to(step_id);
    publisher_->publish_arrived();
    c_.frees->release_completed();
  }
  // Undoes the effects of the step on rows, host pages and the tables of the worker.
  void undo(const StepJournal::Step& step, Invalidation* invalid) {
    for (const StepJournal::Served& served : step.rows) {
      if (!c_.rows->is_still(served.row, served.admission)) continue;
      invalid->limit_row(served.row, served.start);
      c_.resend(served.row);
    }
    for (const StepJournal::Swapped& swapped : step.swapped) {
      if (c_.rows->is_still(swapped.row, swapped.admission)) invalid->limit_row(swapped.row, 0);
    }
    if (c_.host != nullptr) {
      c_.host->pages().evict(step.written.data(), static_cast<int64_t>(step.written.size()));
    }
    for (int32_t row : step.clear_rows) {
      if (c_.rows->is_in_use(row) && c_.row(row).by_step()) {
        c_.plan->resend(row);
      } else {
        c_.plan->clear_later(row);
      }
    }
  }
  void note_evicted_of(const StepJournal::Left& left,
                       const std::function<bool(BlockId)>& is_evicted) {
    for (const CacheGroup& group : *c_.groups) {
      // A page of a state is recorded when its row leaves it.
      if (!group.is_cached || group.rules->traits.updates_in_place) continue;
      for (int64_t b = 0; group.hash_index(b) < left.chain->num_known_hashes(); ++b) {
        const BlockId oldest = find_block(*c_.pool, *left.chain, group, b);
        if (oldest == kNullBlock) continue;
        BlockId id = oldest;
        do {  // any of the blocks with this hash may be the one that the row held
          if (is_evicted(id)) c_.journal->note_forgotten(left, b * group.block_size, id);
          id = c_.pool->next_of_hash(id);
        } while (id != oldest);
      }
    }
  }
  using LeftRows = std::unordered_map<int64_t, StepJournal::Left>;  // by admission number
  // Adds blocks that an aborted step published, unless they were computed earlier. `left`: chains
  // of rows that have released blocks.
  void add_published(const StepJournal::Published& published, const LeftRows& left,
                     Invalidation* invalid) const {
    if (c_.pool->generation(published.id) != published.generation) return;
    int64_t num_valid = 0;  // for a freed row, no tokens are known to be valid
    if (c_.rows->is_still(published.row, published.admission)) {
      const auto limit = invalid->limits().find(published.row);
      const int64_t end = published.first_token + (*c_.groups)[published.group].block_size;
      if (limit == invalid->limits().end() || end <= limit->second) return;
      num_valid = std::max(limit->second, published.first_token);
    }
    invalid->add_block(published.id, num_valid);
    // An earlier step may also have written to the block, and the row may have used it for later
    // tokens. For states, this was recorded when the row left the page.
    const auto row = left.find(published.admission);
    if (row == left.end() || (*c_.groups)[published.group].rules->traits.updates_in_place) return;
    c_.journal->note_forgotten(row->second, published.first_token, published.id);
  }
  // Other pages that the step gave to rows have been released: a row keeps only blocks with tokens
  // that do not depend on the step, blocks beyond external tokens, and the encoder's pages.
  void note_given(const StepJournal::Step& step) {
    given_.insert(given_.end(), step.given.begin(), step.given.end());
    for (const StepJournal::Served& served : step.rows) {
      if (!c_.rows->is_still(served.row, served.admission)) continue;
      const Row& r = c_.row(served.row);
      if (r.is_on_host() || c_.rows->info(served.row).step != step.id) continue;
      c_.rows->info(served.row).was_aborted = r.is_receiving();
      for (const CacheGroup& group : *c_.groups) {
        const PageTraits& traits = group.rules->traits;
        if (traits.follows_sequence && !traits.appends) continue;
        const RowBlocks& held = c_.held(served.row, group);
        const int64_t first =
            traits.follows_sequence ? ceil_div(r.num_computed, group.block_size) : 0;
        for (int64_t b = std::max(first, held.num_dropped); b < held.size(); ++b) {
          given_.push_back({held[b], c_.pool->generation(held[b])});
        }
      }
    }
  }
  // Truncates the row to its first `limit` tokens. If it cannot resume there, releases all of its
  // blocks that follow the sequence and returns false.
  bool keep_first(int32_t row, int64_t limit) {
    if (c_.row(row).is_on_host() || !release_->can_resume(row, limit)) {
      release_->let_go(row);
      return false;
    }
    release_->truncate(row, limit);
    publisher_->refresh(row);
    return true;
  }
  // `most_had`: tokens beyond it never arrived (see CountedTokens).
  Recompute recompute(const Invalidation::Limits& limits, int64_t most_had = kUnbounded) {
    RowTable& rows = *c_.rows;
    Recompute out;
    std::vector<int32_t> to_restart;
    for (const auto& [row, limit] : limits) {
      if (limit >= rows[row].num_computed) continue;
      if (rows[row].is_receiving()) {  // the sender still writes to its blocks
        rows.info(row).num_valid = std::min(rows.info(row).num_valid, limit);
        continue;
      }
      out.rows.push_back(row);
      if (!keep_first(row, limit)) to_restart.push_back(row);
      c_.resend(row);
    }
    for (int32_t row : to_restart) {
      server_->restart(row, std::min(rows[row].num_computed, most_had));
    }
    for (int32_t row : out.rows) {
      out.num_computed_tokens.push_back(static_cast<int32_t>(rows[row].num_computed));
    }
    return out;
  }

  RowContext c_;
  Publisher* publisher_;
  RowRelease* release_;
  RowServer* server_;
  std::vector<StepJournal::Given> given_;  // to list in the next plan
};

}  // namespace kvcache
