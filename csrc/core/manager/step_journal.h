// SPDX-License-Identifier: Apache-2.0
// Records the effects of steps in flight, so that an aborted step can be undone.
//
// Invariant: contains at most kMaxStepsInFlight steps, in ascending order, none of which is done.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/hashing/token_chain.h"
#include "core/manager/row_table.h"

namespace kvcache {

// The numbers of the steps that were created, issued and completed.
// Invariant: last_issued < num_steps, num_completed <= num_steps.
struct StepNumbers {
  int64_t num_steps = 0;      // number of the next step, or of the current one
  int64_t last_issued = -1;   // the last issued step that was not aborted
  int64_t num_completed = 0;  // all steps below this number are done

  void issue() { last_issued = num_steps++; }
  void complete(int64_t step_id) { num_completed = std::max(num_completed, step_id + 1); }

  void check_invariants() const {
    require(last_issued < num_steps && num_completed <= num_steps,
            "a step that was never created was issued or completed");
  }
};

class StepJournal {
 public:
  // The maximum number of recorded steps. Older ones cannot be aborted.
  static constexpr int64_t kMaxStepsInFlight = 64;

  struct Served {
    int32_t row;
    int64_t admission;
    int64_t start;  // earlier tokens are valid even if the step is aborted
  };
  struct Published {
    int32_t row;
    BlockId id;
    int64_t admission, first_token;
    uint8_t group, generation;  // the generation detects that the block was reallocated
  };
  struct Dropped {
    int32_t row;
    BlockId id;
    int64_t admission, first_token;
    std::shared_ptr<TokenChain> chain;  // chain of the row, which may have been freed
  };
  struct Left {  // a row that has released its blocks
    int32_t row;
    int64_t admission;
    std::shared_ptr<TokenChain> chain;
  };
  struct Swapped {
    int32_t row;
    int64_t admission;
  };
  struct Given {  // a page that an aborted plan gave to a row, and that this plan lists again
    BlockId id;
    uint8_t generation;
  };
  struct Step {
    int64_t id;
    std::vector<Served> rows;
    std::vector<Swapped> swapped;  // rows moved to or from the host
    std::vector<BlockId> written;  // host pages
    std::vector<int32_t> clear_rows;
    std::vector<Published> published;
    std::vector<Dropped> dropped;
    std::vector<Left> left;
    std::vector<Given> given;

    void clear() {  // keeps the memory
      rows.clear();
      swapped.clear();
      written.clear();
      clear_rows.clear();
      published.clear();
      dropped.clear();  // releases the chains
      left.clear();
      given.clear();
    }
  };

  const StepNumbers& numbers() const { return numbers_; }
  const std::list<Step>& in_flight() const { return in_flight_; }  // in ascending order

  // Opens the next step. Notes belong to this step until the following step is opened.
  void begin() {
    // Compares step numbers instead of counts, because aborts leave gaps.
    while (!in_flight_.empty() && in_flight_.front().id <= numbers_.num_steps - kMaxStepsInFlight) {
      forget_oldest();
    }
    if (spare_.empty()) spare_.emplace_back();
    spare_.front().id = numbers_.num_steps;
    in_flight_.splice(in_flight_.end(), spare_, spare_.begin());
  }
  // Called when the plan of the step is complete. The plan clears these rows.
  void issue(const std::vector<int32_t>& clear_rows) {
    in_flight_.back().clear_rows = clear_rows;
    numbers_.issue();
  }
  const Step& last() const { return in_flight_.back(); }  // the journal must not be empty
  // Returns the last issued step that was not aborted, or -1.
  int64_t last_kept() const { return in_flight_.empty() ? last_forgotten_ : in_flight_.back().id; }

  // These functions add notes to the last opened step, also between steps. Notes are recorded only
  // for rows admitted by `step`, and only while a step is in flight.
  void note_served(int32_t row, const Row& r, int64_t start) {
    in_flight_.back().rows.push_back({row, r.admission, start});
  }
  // The notes of `note_served` of the current step.
  std::vector<Served>& served() { return in_flight_.back().rows; }
  void note_swapped(int32_t row, const Row& r) {
    in_flight_.back().swapped.push_back({row, r.admission});
  }
  void note_written(const std::vector<BlockId>& pages) {
    if (in_flight_.empty()) return;
    std::vector<BlockId>& written = in_flight_.back().written;
    written.insert(written.end(), pages.begin(), pages.end());
  }
  void note_given(const Given& given) { in_flight_.back().given.push_back(given); }
  void note_published(int32_t row, const Row& r, int64_t first_token, uint8_t group, BlockId id,
                      uint8_t generation) {
    if (!notes(r)) return;
    in_flight_.back().published.push_back({row, id, r.admission, first_token, group, generation});
  }
  void note_dropped(int32_t row, const Row& r, int64_t first_token, BlockId id) {
    if (notes(r)) note_forgotten({row, r.admission, r.chain}, first_token, id);
  }
  void note_left(int32_t row, const Row& r) {
    if (notes(r)) in_flight_.back().left.push_back({row, r.admission, r.chain});
  }
  // Records a block that its row has released and that lookups do not find, or soon will not find.
  void note_forgotten(const Left& left, int64_t first_token, BlockId id) {
    if (in_flight_.empty()) return;
    in_flight_.back().dropped.push_back({left.row, id, left.admission, first_token, left.chain});
  }
  // Whether notes on this row are recorded.
  bool notes(const Row& r) const { return !in_flight_.empty() && r.by_step(); }
  // Copies the notes of the parent to a child, which holds the same blocks.
  void inherit(int32_t parent, const Row& of_parent, int32_t child, const Row& of_child) {
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

  // These functions throw std::invalid_argument for a step that does not exist or can no longer be
  // aborted.
  void check_step_id(int64_t step_id) const {
    if (step_id >= 0 && step_id < numbers_.num_steps) return;
    if (numbers_.num_steps == 0) throw_invalid("step_id is ", step_id, ": no step has been made");
    throw_invalid("step_id is ", step_id, ": expected 0 to ", numbers_.num_steps - 1,
                  ", the steps so far");
  }
  void check_may_abort(int64_t step_id) const {
    const auto fail = [&](const char* why) {
      throw_invalid("step_id is ", step_id, ": expected a step that may be in flight, but ", why);
    };
    if (step_id < numbers_.num_completed) fail("it was reported as done");
    if (step_id < numbers_.num_steps - kMaxStepsInFlight) fail("it is too old");
  }

  // Removes this step and all earlier ones, which are done.
  void complete_to(int64_t step_id) {
    numbers_.complete(step_id);
    while (!in_flight_.empty() && in_flight_.front().id < numbers_.num_completed) {
      forget_oldest();
    }
  }
  // Removes and returns this step and all later ones, newest first, unless it was already aborted.
  // Their blocks may contain results of the preceding step, which therefore keeps these notes.
  std::vector<Step> abort_from(int64_t step_id) {
    std::vector<Step> aborted;
    const auto is_it = [&](const Step& step) { return step.id == step_id; };
    if (std::none_of(in_flight_.begin(), in_flight_.end(), is_it)) return aborted;
    while (!in_flight_.empty() && in_flight_.back().id >= step_id) {
      aborted.push_back(std::move(in_flight_.back()));
      in_flight_.pop_back();
    }
    numbers_.last_issued = last_kept();  // an earlier step may have been aborted before
    if (in_flight_.empty()) return aborted;
    Step& before = in_flight_.back();
    for (const Step& step : aborted) {
      before.published.insert(before.published.end(), step.published.begin(), step.published.end());
      before.dropped.insert(before.dropped.end(), step.dropped.begin(), step.dropped.end());
      before.left.insert(before.left.end(), step.left.begin(), step.left.end());
    }
    return aborted;
  }

  void check_invariants() const {
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

 private:
  // Removes the oldest step, which can then no longer be aborted.
  void forget_oldest() {
    last_forgotten_ = in_flight_.front().id;
    in_flight_.front().clear();
    spare_.splice(spare_.begin(), in_flight_, in_flight_.begin());
  }

  StepNumbers numbers_;
  std::list<Step> in_flight_;
  std::list<Step> spare_;        // empty steps, whose memory is reused for the next steps
  int64_t last_forgotten_ = -1;  // last step that was removed but not aborted
};

}  // namespace kvcache
