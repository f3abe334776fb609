// SPDX-License-Identifier: Apache-2.0
// Processes reports: completes steps, or restores rows and caches to valid content after a step was
// aborted or content was found to be invalid.
//
// The class has no state. Invariant: a row that recomputes keeps no invalid token, and no cache
// contains a block computed from an invalid token.
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

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
                   const std::vector<BlockId>& failed_on_host);
  Recompute invalidate(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages);

  // Ends the wait of a receiving row. At most num_tokens of its tokens have arrived, and the row
  // continues after them.
  void receive(int32_t row, int64_t num_tokens);

  // Adds the pages that aborted plans gave to rows, and that the rows still hold without content,
  // to the current plan, because the aborted plans may not have reached the worker.
  void give_again();

  // Called before the hashes of the device blocks for which `is_evicted` returns true are removed.
  // Records in the journal which of these blocks belong to prefixes of freed rows whose steps may
  // be in flight. If one of the blocks fails later, lookups cannot find it.
  void note_evicted(const std::function<bool(BlockId)>& is_evicted);
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
  void forget_adapter(uint32_t adapter);

 private:
  // Undoes this step and all later ones. Each row returns to its state before the first of these
  // steps that served it, and their results are removed from the device cache. No effect if the
  // step was already aborted.
  Recompute abort_from(int64_t step_id);
  void complete_to(int64_t step_id) {
    c_.journal->complete_to(step_id);
    publisher_->publish_arrived();
    c_.frees->release_completed();
  }
  void undo(const StepJournal::Step& step, Invalidation* invalid);
  void note_evicted_of(const StepJournal::Left& left,
                       const std::function<bool(BlockId)>& is_evicted);
  using LeftRows = std::unordered_map<int64_t, StepJournal::Left>;  // by admission number
  void add_published(const StepJournal::Published& published, const LeftRows& left,
                     Invalidation* invalid) const;
  void note_given(const StepJournal::Step& step);
  // `most_had`: tokens beyond it never arrived (see CountedTokens).
  Recompute recompute(const Invalidation::Limits& limits, int64_t most_had = kUnbounded);

  RowContext c_;
  Publisher* publisher_;
  RowRelease* release_;
  RowServer* server_;
  std::vector<StepJournal::Given> given_;  // to list in the next plan
};

}  // namespace kvcache
