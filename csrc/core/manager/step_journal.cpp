// SPDX-License-Identifier: Apache-2.0
#include "core/manager/step_journal.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"

namespace kvcache {

void StepJournal::begin() {
  // Compares step numbers instead of counts, because aborts leave gaps.
  while (!in_flight_.empty() && in_flight_.front().id <= numbers_.num_steps - kMaxStepsInFlight) {
    forget_oldest();
  }
  if (spare_.empty()) spare_.emplace_back();
  spare_.front().id = numbers_.num_steps;
  in_flight_.splice(in_flight_.end(), spare_, spare_.begin());
}

void StepJournal::forget_oldest() {
  Step& oldest = in_flight_.front();
  last_left_ = oldest.id;
  oldest.rows.clear();
  oldest.swapped.clear();
  oldest.written.clear();
  oldest.clear_rows.clear();
  oldest.published.clear();
  oldest.dropped.clear();  // releases the chains
  oldest.left.clear();
  oldest.given.clear();
  spare_.splice(spare_.begin(), in_flight_, in_flight_.begin());
}

void StepJournal::issue(const std::vector<int32_t>& clear_rows) {
  in_flight_.back().clear_rows = clear_rows;
  numbers_.issue();
}

void StepJournal::note_swapped(int32_t row, const Row& r) {
  in_flight_.back().swapped.push_back({row, r.admission});
}

void StepJournal::note_written(const std::vector<BlockId>& pages) {
  if (in_flight_.empty()) return;
  std::vector<BlockId>& written = in_flight_.back().written;
  written.insert(written.end(), pages.begin(), pages.end());
}

void StepJournal::note_dropped(int32_t row, const Row& r, int64_t first_token, BlockId id) {
  if (!notes(r)) return;
  in_flight_.back().dropped.push_back({row, id, r.admission, first_token, r.chain});
}

void StepJournal::note_left(int32_t row, const Row& r) {
  if (notes(r)) in_flight_.back().left.push_back({row, r.admission, r.chain});
}

void StepJournal::note_forgotten(const Left& left, int64_t first_token, BlockId id) {
  if (in_flight_.empty()) return;
  in_flight_.back().dropped.push_back({left.row, id, left.admission, first_token, left.chain});
}

void StepJournal::inherit(int32_t parent, const Row& of_parent, int32_t child,
                          const Row& of_child) {
  const auto copy = [&](auto* notes) {
    const size_t num_before = notes->size();  // the copies are appended
    for (size_t i = 0; i < num_before; ++i) {
      if ((*notes)[i].row != parent || (*notes)[i].admission != of_parent.admission) continue;
      auto note = (*notes)[i];
      note.row = child;
      note.admission = of_child.admission;
      notes->push_back(std::move(note));
    }
  };
  for (Step& step : in_flight_) {
    copy(&step.rows);
    copy(&step.swapped);
    copy(&step.dropped);
  }
}

void StepJournal::check_step_id(int64_t step_id) const {
  if (step_id >= 0 && step_id < numbers_.num_steps) return;
  if (numbers_.num_steps == 0) throw_invalid("step_id is ", step_id, ": no step has been made");
  throw_invalid("step_id is ", step_id, ": expected 0 to ", numbers_.num_steps - 1,
                ", the steps so far");
}

void StepJournal::check_may_abort(int64_t step_id) const {
  const char* why = step_id < numbers_.num_completed                   ? "it was reported as done"
                    : step_id < numbers_.num_steps - kMaxStepsInFlight ? "it is too old"
                                                                       : nullptr;
  if (why == nullptr) return;
  throw_invalid("step_id is ", step_id, ": expected a step that may be in flight, but ", why);
}

void StepJournal::complete_to(int64_t step_id) {
  numbers_.complete(step_id);
  while (!in_flight_.empty() && in_flight_.front().id < numbers_.num_completed) {
    forget_oldest();
  }
}

std::vector<StepJournal::Step> StepJournal::abort_from(int64_t step_id) {
  std::vector<Step> aborted;
  const auto is_it = [&](const Step& step) { return step.id == step_id; };
  if (std::none_of(in_flight_.begin(), in_flight_.end(), is_it)) return aborted;
  while (!in_flight_.empty() && in_flight_.back().id >= step_id) {
    aborted.push_back(std::move(in_flight_.back()));
    in_flight_.pop_back();
  }
  numbers_.abort_from(step_id);
  if (in_flight_.empty()) return aborted;
  Step& before = in_flight_.back();
  for (const Step& step : aborted) {
    before.published.insert(before.published.end(), step.published.begin(), step.published.end());
    before.dropped.insert(before.dropped.end(), step.dropped.begin(), step.dropped.end());
    before.left.insert(before.left.end(), step.left.begin(), step.left.end());
  }
  return aborted;
}

void StepJournal::check_invariants() const {
  numbers_.check_invariants();
  int64_t before = numbers_.num_completed - 1;
  for (const Step& step : in_flight_) {
    require(step.id > before && step.id < numbers_.num_steps,
            "the journal has a step that is done, or steps out of order");
    before = step.id;
  }
  require(static_cast<int64_t>(in_flight_.size()) <= kMaxStepsInFlight,
          "the journal has more steps than may be in flight");
}

}  // namespace kvcache
