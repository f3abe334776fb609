// What a worker says of steps: done, or come to nothing; and blocks that turned out to be wrong.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/manager.h"

namespace kvcache {

// Checks everything first: what a report says is taken in whole or not at all.
Recompute Manager::report(int64_t step_id, bool completed, const BlockId* failed, int64_t n) {
  const Call call(this);
  check_step_id(step_id);
  const std::vector<BlockId> bad = checked_ids(failed, n, "failed_pages");
  if (!completed) check_may_abort(step_id);
  if (!completed || !bad.empty()) hash_rows();  // else nothing is withdrawn: most reports
  Recompute all;
  if (!completed) all = abort_from(step_id);
  if (!bad.empty()) {
    // Before the step is done: its journal knows who has used these pages and let go of them.
    const Recompute more = withdraw_ids(bad);
    all.rows.insert(all.rows.end(), more.rows.begin(), more.rows.end());
    all.num_computed_tokens.insert(all.num_computed_tokens.end(), more.num_computed_tokens.begin(),
                                   more.num_computed_tokens.end());
  }
  if (completed) complete_to(step_id);
  return all;
}

Recompute Manager::invalidate(const BlockId* ids, int64_t n) {
  const Call call(this);
  const std::vector<BlockId> bad = checked_ids(ids, n, "ids");
  hash_rows();
  return withdraw_ids(bad);
}

void Manager::check_step_id(int64_t step_id) const {
  if (step_id >= 0 && step_id < num_steps_) return;
  throw std::invalid_argument(
      "step_id is " + std::to_string(step_id) +
      (num_steps_ == 0
           ? std::string(": there was no step yet")
           : ": expected 0 to " + std::to_string(num_steps_ - 1) + ", the steps there were"));
}

void Manager::check_may_abort(int64_t step_id) const {
  const char* why = step_id < num_completed_                   ? "it was reported done"
                    : step_id < num_steps_ - kMaxStepsInFlight ? "it is too long ago"
                                                               : nullptr;
  if (why == nullptr) return;
  throw std::invalid_argument("step_id is " + std::to_string(step_id) +
                              ": expected a step that may be in flight, but " + why);
}

// A copy: a digest from Python could change the caller's.
std::vector<BlockId> Manager::checked_ids(const BlockId* ids, int64_t n, const char* name) const {
  const std::vector<BlockId> out(ids, ids + n);
  for (BlockId id : out) pool_.check_id(id, name);
  return out;
}

// What a row has dropped is known by its hashes alone; restarted rows look theirs up.
void Manager::hash_rows() {
  for (const Row& row : rows_) {
    if (row.chain != nullptr) hash_ahead(*row.chain, /*reads=*/true);
  }
  for (const Step& step : in_flight_) {
    for (const Step::Dropped& each : step.dropped) hash_ahead(*each.chain, /*reads=*/true);
  }
}

void Manager::complete_to(int64_t step_id) {
  num_completed_ = std::max(num_completed_, step_id + 1);
  while (!in_flight_.empty() && in_flight_.front().id < num_completed_) in_flight_.pop_front();
  lift_fences();
}

// Everything that was computed from what an aborted step computed, an aborted step has computed: a
// row goes back to where its first one began, and what its blocks hold from there on is bad.
Recompute Manager::abort_from(int64_t step_id) {
  const auto is_it = [&](const Step& step) { return step.id == step_id; };
  if (std::none_of(in_flight_.begin(), in_flight_.end(), is_it)) return {};  // aborted before
  Bad bad;
  Limits limits;
  std::vector<Step::Published> published;
  std::vector<Step::Dropped> dropped;
  const auto is_there = [&](int32_t row, int64_t admission) {
    return rows_[row].chain != nullptr && rows_[row].admission == admission;
  };
  while (!in_flight_.empty() && in_flight_.back().id >= step_id) {
    const Step& step = in_flight_.back();
    published.insert(published.end(), step.published.begin(), step.published.end());
    dropped.insert(dropped.end(), step.dropped.begin(), step.dropped.end());
    for (const Step::Served& served : step.rows) {
      if (!is_there(served.row, served.admission)) continue;
      int64_t start = served.start;
      for (const CacheGroup& group : groups_) {
        // The copy that the plan was to make did not come.
        const bool is_copied = served.is_new && held(served.row)[group.id].num_copied > 0;
        if (is_copied) start = std::min(start, served.start - served.start % group.block_size);
      }
      const auto [limit, is_first] = limits.emplace(served.row, start);
      limit->second = std::min(limit->second, start);
      resend(served.row);
    }
    for (int32_t row : step.clear_rows) {
      if (rows_[row].chain != nullptr && rows_[row].by_step) {
        resend(row);
      } else {
        clear_rows_.push_back(row);
      }
    }
    in_flight_.pop_back();
  }
  for (const Step::Published& each : published) {
    if (pool_.tenancy(each.id) != each.tenancy) continue;
    int64_t num_right = 0;  // of a row that has left: nobody knows
    if (is_there(each.row, each.admission)) {
      const auto limit = limits.find(each.row);
      const int64_t end = each.first_token + groups_[each.group].block_size;
      if (limit == limits.end() || end <= limit->second) continue;
      num_right = std::max(limit->second, each.first_token);
    }
    add_block(each.id, num_right, &bad);
  }
  // What was published late, or dropped, may have been computed by a step that is still in flight.
  if (!in_flight_.empty()) {
    Step& step = in_flight_.back();
    step.published.insert(step.published.end(), published.begin(), published.end());
    step.dropped.insert(step.dropped.end(), dropped.begin(), dropped.end());
  }
  // Nothing reads any more for these steps.
  last_issued_ = std::min(last_issued_, step_id - 1);
  for (Fence& fence : fences_) fence.step_id = std::min(fence.step_id, last_issued_);
  lift_fences();
  return withdraw(std::move(bad), std::move(limits), /*by_hash=*/false);
}

}  // namespace kvcache
