// Rows that go on from another's blocks.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/manager/manager.h"

namespace kvcache {

Slots Manager::fork(int32_t row, const std::shared_ptr<TokenChain>& child) {
  const Call call(this);
  checks_.check_fork(row, *child);
  // Filled blocks are published now: none that both hold is left to be.
  if (publisher_.may_publish(row)) {
    intake_.hash_filled(row);
    checks_.check_fork(row, *child);  // a digest may call back
  }
  if (!rows_.has_free()) return {Status::kWait, -1, {}, {}};
  publisher_.publish(row);
  child->adopt_hashes(*rows_[row].chain, rows_[row].num_computed);

  const int32_t other = rows_.take();
  Row& parent = rows_[row];
  Row& r = rows_[other];
  parent.has_forked = parent.may_share = true;
  const int64_t admission = r.admission;
  r = parent;
  r.chain = child;
  r.start = r.num_computed;
  r.admission = admission;
  rows_.info(other) = {child->num_tokens(), r.num_computed, rows_.info(row).num_marked};
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = rows_.blocks(other)[group.id];
    each = rows_.blocks(row)[group.id];
    pool_.retain(each.blocks.data() + each.num_dropped, each.num_alive());
    if (!group.is_cacheable()) continue;
    each.num_hits = each.size();
    each.num_published = std::max(each.num_published, r.num_computed / group.block_size);
    each.num_partial = std::max(each.num_partial, r.num_computed / hash_block_size_);
  }
  publisher_.refresh(other);
  if (r.by_step) journal_.inherit(row, parent, other, r);
  row_context().resend(other);
  return {Status::kServed, other, {}, {}};
}

}  // namespace kvcache
