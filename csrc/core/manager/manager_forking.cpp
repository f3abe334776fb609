// Rows that go on from another's blocks.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::check_fork(int32_t row, const TokenChain& child) const {
  const Row& parent = at(row);
  check_on_device(row);
  check_new(child);
  const int64_t num_known = parent.chain->num_tokens();
  if (num_known < parent.num_computed) {
    throw std::invalid_argument(
        "row " + std::to_string(row) + " has " + std::to_string(parent.num_computed) +
        " computed tokens, of which " + std::to_string(num_known) +
        " are known: expected the others to be appended or rejected before it is forked");
  }
  if (child.begins_like(*parent.chain, parent.num_computed)) return;
  throw std::invalid_argument("the child has other tokens, or other extra keys, than row " +
                              std::to_string(row) + ": expected the same for the " +
                              std::to_string(parent.num_computed) + " computed tokens");
}

Slots Manager::fork(int32_t row, const std::shared_ptr<TokenChain>& child) {
  const Call call(this);
  check_fork(row, *child);
  // What has filled is published now: none that both hold is left to be.
  if (rows_[row].num_computed >= rows_[row].next_publish) {
    hash_filled(row);
    check_fork(row, *child);  // a digest may call back
  }
  if (!has_free_row()) return {Status::kWait, -1, {}, {}};
  publish(row);
  child->adopt_hashes(*rows_[row].chain, rows_[row].num_computed);

  const int32_t other = take_row();
  Row& parent = rows_[row];
  Row& r = rows_[other];
  parent.has_forked = parent.may_share = true;
  r = parent;
  r.chain = child;
  r.start = r.num_computed;
  r.admission = ++num_admissions_;
  admission_info_[other] = {child->num_tokens(), r.num_computed, admission_info_[row].num_marked};
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = held(other)[group.id];
    each = held(row)[group.id];
    pool_.retain(each.blocks.data() + each.num_dropped, each.num_alive());
    if (!group.is_cacheable()) continue;
    each.num_hits = static_cast<int64_t>(each.blocks.size());
    each.num_published = std::max(each.num_published, r.num_computed / group.block_size);
    each.num_partial = std::max(each.num_partial, r.num_computed / hash_block_size_);
  }
  r.next_publish = next_publish(r, held(other));
  if (r.by_step) note_forked(row, other);
  resend(other);
  return {Status::kServed, other, {}, {}};
}

// Whatever becomes of the steps that computed the parent's blocks becomes of the child's.
void Manager::note_forked(int32_t row, int32_t child) {
  const auto of_parent = [&](const auto& each) {
    return each.row == row && each.admission == rows_[row].admission;
  };
  const int64_t admission = rows_[child].admission;
  for (Step& step : in_flight_) {
    const auto inherit = [&](auto& entries) {
      for (size_t i = 0, n = entries.size(); i < n; ++i) {
        if (!of_parent(entries[i])) continue;
        auto entry = entries[i];
        entry.row = child;
        entry.admission = admission;
        entries.push_back(std::move(entry));
      }
    };
    inherit(step.rows);
    inherit(step.swapped);
    inherit(step.dropped);
  }
}

}  // namespace kvcache
