// What a step's plan tells, and what the journal of steps in flight keeps.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::answer(int32_t row, Status status, int64_t start, bool is_new) {
  plan_.answer(row, status, start);
  if (status != Status::kServed) return;
  journal_.note_served(row, rows_[row], safe_start_);
  if (is_new) {
    std::fill(sizes_.begin(), sizes_.end(), 0);
  } else if (plan_.must_resend(row)) {
    return;  // sent whole when all are served
  }
  plan_.append(row, rows_.blocks(row), sizes_.data());
}

void Manager::emit_resent() {
  std::fill(sizes_.begin(), sizes_.end(), 0);
  for (int32_t row : plan_.take_resent()) {
    plan_.clear(row);
    if (!rows_[row].on_host)
      plan_.append(row, rows_.blocks(row), sizes_.data());  // else when it is back
  }
}

void Manager::note_dropped(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  journal_.note_dropped(row, rows_[row], block * group.block_size, id);
}

// What a row that leaves has computed and nothing finds, and what it loads.
void Manager::note_left(int32_t row) {
  if (!journal_.notes(rows_[row])) return;
  for (const HostTier::Onboard& onboard : onboards()) {
    const RowBlocks& each = rows_.blocks(row)[onboard.group];
    if (onboard.column < each.size() && each[onboard.column] == onboard.block) {
      note_dropped(row, groups_[onboard.group], onboard.column, onboard.block);
    }
  }
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    if (!group.is_cacheable()) continue;
    const int64_t size = rows_.num_written(row, group);
    // What was published is found, unless something of this happened.
    const bool may_be_lost = has_forgotten_ || host_ != nullptr || rows_[row].has_forked;
    const int64_t first =
        may_be_lost ? each.num_dropped : std::max(each.num_dropped, each.num_published);
    for (int64_t b = first; b < size; ++b) {
      const BlockId id = each.blocks[static_cast<size_t>(b)];
      if (pool_.hash_of(id) == nullptr) note_dropped(row, group, b, id);
    }
  }
}

}  // namespace kvcache
