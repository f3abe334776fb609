// What a step's plan tells, and what the journal of steps in flight keeps.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::answer(int32_t row, Status status, int64_t start, bool is_new) {
  plan_.answer(row, status, start);
  if (status != Status::kServed) return;
  in_flight_.back().rows.push_back({row, rows_[row].admission, safe_start_});
  if (is_new) {
    std::fill(sizes_.begin(), sizes_.end(), 0);
  } else if (plan_.must_resend(row)) {
    return;  // sent whole when all are served
  }
  plan_.append(row, held(row), sizes_.data());
}

void Manager::emit_resent() {
  std::fill(sizes_.begin(), sizes_.end(), 0);
  for (int32_t row : plan_.take_resent()) {
    plan_.clear(row);
    if (!rows_[row].on_host) plan_.append(row, held(row), sizes_.data());  // else when it is back
  }
}

void Manager::note_dropped(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  if (in_flight_.empty() || !rows_[row].by_step) return;
  in_flight_.back().dropped.push_back(
      {row, id, rows_[row].admission, block * group.block_size, rows_[row].chain});
}

// What a row that leaves has computed and nothing finds, and what it loads.
void Manager::note_left(int32_t row) {
  if (in_flight_.empty() || !rows_[row].by_step) return;
  for (const HostTier::Onboard& onboard : onboards()) {
    const RowBlocks& each = held(row)[onboard.group];
    if (onboard.column < each.size() && each[onboard.column] == onboard.block) {
      note_dropped(row, groups_[onboard.group], onboard.column, onboard.block);
    }
  }
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = held(row)[group.id];
    if (!group.is_cacheable()) continue;
    const int64_t size = num_written(row, group);
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

// The journal of the step that begins; the memory of one that is too old to be aborted is used
// again. By number, not by count: aborts leave gaps.
void Manager::begin_step() {
  Step step;
  while (!in_flight_.empty() && in_flight_.front().id <= steps_.num_steps - kMaxStepsInFlight) {
    step = std::move(in_flight_.front());
    in_flight_.pop_front();
  }
  step.clear();
  step.id = steps_.num_steps;
  in_flight_.push_back(std::move(step));
}

}  // namespace kvcache
