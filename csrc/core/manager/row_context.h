// The state shared by the components that move rows' blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/plan_builder.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"

namespace kvcache {

struct RowContext {
  const std::vector<CacheGroup>* groups;
  BlockPool* pool;
  HostTier* host;  // null where there is none
  RowTable* rows;
  PlanBuilder* plan;
  StepJournal* journal;
  DeferredFrees* frees;

  // Before the row releases these blocks: they had its last access.
  void note_access(int32_t row, const BlockId* ids, int64_t n) const {
    pool->access(ids, n, rows->info(row).access);
  }

  // For the journal: the row lets go of a block that it had in this column.
  void note_dropped(int32_t row, const CacheGroup& group, int64_t column, BlockId id) const {
    journal->note_dropped(row, (*rows)[row], rows->first_token(row, group, column), id);
  }

  // The row releases its blocks from the size-th on, last ones first.
  void release_tail(int32_t row, const CacheGroup& group, int64_t size) const {
    RowBlocks& each = rows->blocks(row)[group.id];
    if (each.size() <= size) return;
    std::vector<BlockId> ids(each.blocks.rbegin(), each.blocks.rend() - size);
    // The tail of a table may already be gone.
    ids.erase(std::remove(ids.begin(), ids.end(), kNullBlock), ids.end());
    note_access(row, ids.data(), static_cast<int64_t>(ids.size()));
    frees->release_or_defer(ids.data(), static_cast<int64_t>(ids.size()));
    each.resize(size);
    each.lower_hits(size);
  }

  // The next plan sends the row's table anew, if plans have it at all.
  void resend(int32_t row) const {
    if ((*rows)[row].by_step) plan->resend(row);
  }
};

}  // namespace kvcache
