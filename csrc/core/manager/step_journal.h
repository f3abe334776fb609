// A journal of what steps in flight have done, to undo it when one of them comes to nothing.
//
// Invariant: at most kMaxStepsInFlight steps, by their numbers, none of them done.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/row_table.h"
#include "core/manager/step_numbers.h"

namespace kvcache {

class StepJournal {
 public:
  // Steps whose plans may not have been carried out yet; older ones cannot be aborted.
  static constexpr int64_t kMaxStepsInFlight = 64;

  struct Served {
    int32_t row;
    int64_t admission;
    int64_t start;  // tokens before it are valid whatever becomes of the step
  };
  struct Published {
    int32_t row;
    BlockId id;
    int64_t admission, first_token;
    uint8_t group, generation;  // the block may be another request's by now
  };
  struct Dropped {
    int32_t row;
    BlockId id;
    int64_t admission, first_token;
    std::shared_ptr<TokenChain> chain;  // of the row, which may have left
  };
  struct Left {  // a row that has let go of its blocks
    int64_t admission;
    std::shared_ptr<TokenChain> chain;
  };
  struct Swapped {
    int32_t row;
    int64_t admission;
  };
  struct Step {
    int64_t id;
    std::vector<Served> rows;
    std::vector<Swapped> swapped;  // to the host, or back
    std::vector<BlockId> written;  // pages of the host
    std::vector<int32_t> clear_rows;
    std::vector<Published> published;
    std::vector<Dropped> dropped;
    std::vector<Left> left;
  };

  const StepNumbers& numbers() const { return numbers_; }
  const std::deque<Step>& in_flight() const { return in_flight_; }  // by number

  // Opens the next step: until the one after it begins, notes are its own.
  void begin();
  // The step's plan is made, and clears these rows.
  void issue(const std::vector<int32_t>& clear_rows);
  const Step& last() const { return in_flight_.back(); }  // there must be one
  // The last step that was issued and not aborted; -1: none.
  int64_t last_kept() const { return in_flight_.empty() ? last_left_ : in_flight_.back().id; }

  // Notes on the step that was opened last, also between steps. Only of rows that `step` admitted,
  // and only while a step is in flight.
  void note_served(int32_t row, const Row& r, int64_t start) {
    in_flight_.back().rows.push_back({row, r.admission, start});
  }
  void note_swapped(int32_t row, const Row& r);
  void note_written(const std::vector<BlockId>& pages);
  void note_published(int32_t row, const Row& r, int64_t first_token, uint8_t group, BlockId id,
                      uint8_t generation) {
    if (!notes(r)) return;
    in_flight_.back().published.push_back({row, id, r.admission, first_token, group, generation});
  }
  void note_dropped(int32_t row, const Row& r, int64_t first_token, BlockId id);
  void note_left(const Row& r);
  // What an aborted step made findable and a row had let go of: nothing finds it any more.
  void note_forgotten(const Published& published, const std::shared_ptr<TokenChain>& chain);
  // Whether notes on this row would be kept.
  bool notes(const Row& r) const { return !in_flight_.empty() && r.by_step; }
  // A child shares the fate of the steps that computed its parent's blocks.
  void inherit(int32_t row, const Row& r, int32_t child, const Row& c);

  // Throw std::invalid_argument: on a step that there was not, or that cannot be aborted any more.
  void check_step_id(int64_t step_id) const;
  void check_may_abort(int64_t step_id) const;

  // The step and all before it are done.
  void complete_to(int64_t step_id);
  // Takes out the step and all behind it, newest first; none where it was aborted before. What they
  // published or dropped may have been computed by a step before them, which keeps these notes.
  std::vector<Step> abort_from(int64_t step_id);

  void check_invariants() const;

 private:
  // The oldest step cannot be aborted any more.
  void forget_oldest();

  StepNumbers numbers_;
  std::deque<Step> in_flight_;
  Step spare_{};            // empty: its memory is the next step's
  int64_t last_left_ = -1;  // the last step that is not in flight any more, and was not aborted
};

}  // namespace kvcache
