// What a step's plan tells, and what the journal of steps in flight keeps.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::answer(int32_t row, Status status, int64_t start, bool is_new) {
  plan_->rows.push_back(row);
  plan_->status.push_back(static_cast<uint8_t>(status));
  plan_->num_computed_tokens.push_back(static_cast<int32_t>(start));
  if (status != Status::kServed) return;
  in_flight_.back().rows.push_back({row, rows_[row].admission, safe_start_});
  if (is_new) {
    std::fill(sizes_.begin(), sizes_.end(), 0);
  } else if (rows_[row].must_resend) {
    return;  // told whole when all are served
  }
  emit_table(row, sizes_.data());
}

// One entry of a table that the worker has.
void Manager::emit_replaced(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  if (plan_ == nullptr || rows_[row].must_resend) return;
  std::vector<int32_t>& replace = plan_->groups[group.id].replace;
  replace.insert(replace.end(), {row, static_cast<int32_t>(block), id});
}

// The row's blocks from from[g] on, in every group g.
void Manager::emit_table(int32_t row, const int64_t* from) {
  const RowBlocks* h = held(row);
  bool any = false;
  for (size_t g = 0; g < groups_.size(); ++g) {
    any |= static_cast<int64_t>(h[g].blocks.size()) > from[g];
  }
  if (!any) return;
  plan_->append_rows.push_back(row);
  for (size_t g = 0; g < groups_.size(); ++g) {
    StepPlan::Group& group = plan_->groups[g];
    group.append_ids.insert(group.append_ids.end(), h[g].blocks.begin() + from[g],
                            h[g].blocks.end());
    group.append_splits.push_back(static_cast<int32_t>(group.append_ids.size()));
  }
}

void Manager::emit_resent() {
  std::fill(sizes_.begin(), sizes_.end(), 0);
  for (int32_t row : resend_) {
    if (rows_[row].chain == nullptr || !rows_[row].must_resend) continue;
    rows_[row].must_resend = false;
    plan_->clear_rows.push_back(row);
    if (!rows_[row].on_host) emit_table(row, sizes_.data());  // it is told when it comes back
  }
  resend_.clear();
}

void Manager::note_dropped(int32_t row, const CacheGroup& group, int64_t block, BlockId id) {
  if (in_flight_.empty() || !rows_[row].by_step) return;
  in_flight_.back().dropped.push_back(
      {row, id, rows_[row].admission, block * group.block_size, rows_[row].chain});
}

// What a row that leaves has computed and nothing finds, and what it loads.
void Manager::note_left(int32_t row) {
  if (in_flight_.empty() || !rows_[row].by_step) return;
  for (const Onboard& onboard : onboards_) {
    const std::vector<BlockId>& blocks = held(row)[onboard.group].blocks;
    if (onboard.block < static_cast<int64_t>(blocks.size()) &&
        blocks[static_cast<size_t>(onboard.block)] == onboard.device) {
      note_dropped(row, groups_[onboard.group], onboard.block, onboard.device);
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
