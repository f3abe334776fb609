// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/growth.h"

#include <utility>

namespace kvcache {

void Growth::onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
                     BlockId block, bool is_hit) const {
  const std::shared_ptr<TokenChain>& chain = (*c.rows)[served->row].chain;
  c.host->onboard(
      {c.journal->numbers().num_steps, page, block, column, group.id, is_hit ? chain : nullptr});
  served->depends_from(column * group.block_size);
}

void Growth::replace_shared(ServedRow* served, const CacheGroup& group, int64_t column, BlockId own,
                            bool copies) const {
  const int32_t row = served->row;
  RowBlocks& each = held(row, group);
  const BlockId shared = std::exchange(each[column], own);
  c.note_access(row, &shared, 1);
  each.lower_hits(column);
  if (copies) {
    c.note_dropped(row, group, column, shared);  // the row no longer holds the block
    each.state_start = static_cast<int32_t>(served->span.start);
    served->depends_from(column * group.block_size);
    c.plan->copy(shared, own);
    if (c.plan->is_step()) {
      c.plan->hold(shared);  // keeps the block until the copy is done
      return;
    }
  }
  c.frees->release_or_defer(&shared, 1);
}

void Growth::copy_source(ServedRow* served, const CacheGroup& group, BlockId own) const {
  RowBlocks& each = held(served->row, group);
  const int64_t column = served->num_before[group.id];
  c.plan->copy(each.source, own);
  c.note_dropped(served->row, group, column, each.source);  // the row no longer holds the block
  served->depends_from(column * group.block_size);
  each.source = kNullBlock;
}

}  // namespace kvcache
