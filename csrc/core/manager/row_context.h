// SPDX-License-Identifier: Apache-2.0
// State shared by the components that allocate, move and release the blocks of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/shared_blocks.h"
#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/plan_builder.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"

namespace kvcache {

struct RowContext {
  const std::vector<CacheGroup>* groups;
  int64_t hash_block_size;
  BlockPool* pool;
  HostTier* host;  // null without a host tier
  RowTable* rows;
  PlanBuilder* plan;
  StepJournal* journal;
  DeferredFrees* frees;

  Row& row(int32_t id) const { return (*rows)[id]; }
  RowBlocks& held(int32_t row, const CacheGroup& group) const { return rows->held(row, group); }

  // Records the row's last access to these blocks. Called before the row releases them.
  void note_access(int32_t row, const Blocks& blocks) const {
    const Access& access = rows->info(row).access;
    if (access.number > 0) pool->notify(Released{blocks, access});
  }
  // Records the row's last access to all of its blocks. Called before the row takes other blocks,
  // which were not accessed.
  void settle_access(int32_t row) const {
    if (rows->info(row).access.number == 0) return;
    note_access(row, rows->tail_first(row, /*with_all=*/true));
    rows->info(row).access = {};
  }
  // Releases blocks that the row has dropped, in this order.
  void release(int32_t row, const std::vector<BlockId>& ids) const {
    note_access(row, ids);
    frees->release_or_defer(ids);
  }

  // Records in the journal that the row drops the block in this column.
  void note_dropped(int32_t row, const CacheGroup& group, int64_t column, BlockId id) const {
    journal->note_dropped(row, this->row(row), rows->first_token(row, group, column), id);
  }

  // Releases the row's blocks in columns `size` and later, last block first.
  void release_tail(int32_t row, const CacheGroup& group, int64_t size) const {
    RowBlocks& held = rows->held(row, group);
    if (held.size() <= size) return;
    rows->disturb(row);
    std::vector<BlockId> ids(held.blocks.rbegin(), held.blocks.rend() - size);
    // Blocks at the end of the table may already be null.
    ids.erase(std::remove(ids.begin(), ids.end(), kNullBlock), ids.end());
    release(row, ids);
    held.resize(size);
    held.lower_hits(size);
  }

  // If plans contain the row, makes the next plan send its complete table.
  void resend(int32_t row) const {
    if (this->row(row).by_step()) plan->resend(row);
  }
};

// Counts the rows and temporary holders that hold a block.
class BlockHolders final : public SharedBlocks {
 public:
  explicit BlockHolders(const RowContext& context) : SharedBlocks(context.pool), c_(context) {}

  // The number of rows that hold the block. References of connectors and onboards do not count.
  int64_t num_rows(BlockId id) const { return num_users(id) - c_.frees->num_kept_of(id); }

 private:
  bool has_many_users(BlockId id) const override {
    return num_users(id) - c_.plan->num_held(id) > 1;
  }
  int64_t num_users(BlockId id) const {  // rows, and blocks kept for connectors
    const int64_t n = pool_->ref_count(id) - c_.frees->num_waiting_of(id);
    return c_.host == nullptr ? n : n - c_.host->num_onboards_into(id);
  }

  RowContext c_;
};

}  // namespace kvcache
