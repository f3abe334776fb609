// SPDX-License-Identifier: Apache-2.0
#include "core/manager/step_journal.h"

#include "tests/check.h"

using namespace kvcache;
namespace {

Row admitted(int64_t admission, bool by_step = true) {
  Row row;
  row.admission = admission;
  if (by_step) row.served_by = ServedBy::kSteps;
  return row;
}

void step(StepJournal* journal) {
  journal->begin();
  journal->issue({});
  journal->check_invariants();
}

TEST(notes_belong_to_the_last_opened_step) {
  StepJournal journal;
  journal.note_dropped(1, admitted(1), 0, 5);  // no step is in flight, so nothing is recorded
  journal.begin();
  journal.note_served(1, admitted(7), 16);
  journal.issue({3, 4});
  journal.note_dropped(1, admitted(7), 8, 5);  // between steps
  journal.note_published(1, admitted(7), 8, 0, 6, 2);
  journal.note_dropped(2, admitted(8, /*by_step=*/false), 8, 5);
  const StepJournal::Step& last = journal.last();
  CHECK_EQ(last.id, 0);
  CHECK_EQ(last.rows.size(), 1);
  CHECK_EQ(last.rows[0].start, 16);
  CHECK_EQ(last.clear_rows.size(), 2);
  CHECK_EQ(last.dropped.size(), 1);
  CHECK_EQ(last.dropped[0].first_token, 8);
  CHECK_EQ(last.published[0].generation, 2);
}

TEST(completed_steps_are_removed) {
  StepJournal journal;
  for (int i = 0; i < 5; ++i) step(&journal);
  journal.complete_to(2);
  CHECK_EQ(journal.in_flight().size(), 2);
  CHECK_EQ(journal.in_flight().front().id, 3);
  journal.complete_to(1);  // a late report changes nothing
  CHECK_EQ(journal.numbers().num_completed, 3);
  journal.check_invariants();
  CHECK_THROWS(journal.check_may_abort(2), "expected a step that may be in flight, but it was rep");
  journal.check_may_abort(3);
}

TEST(last_issued_skips_aborted_steps) {
  StepJournal journal;
  CHECK_EQ(journal.last_kept(), -1);
  for (int i = 0; i < 4; ++i) step(&journal);
  CHECK_EQ(journal.last_kept(), 3);
  journal.abort_from(2);
  CHECK_EQ(journal.last_kept(), 1);
  step(&journal);
  journal.abort_from(4);  // steps 2 and 3 were already aborted
  CHECK_EQ(journal.last_kept(), 1);
  journal.complete_to(1);
  CHECK_EQ(journal.last_kept(), 1);
  for (int64_t i = 0; i < StepJournal::kMaxStepsInFlight + 1; ++i) step(&journal);
  journal.abort_from(6);
  CHECK_EQ(journal.last_kept(), 5);  // the step is too old to be aborted
}

TEST(steps_that_are_aborted_one_by_one_leave_none) {
  StepJournal journal;
  for (int64_t i = 0; i < 2; ++i) {
    step(&journal);
    journal.abort_from(i);
  }
  CHECK_EQ(journal.numbers().last_issued, -1);  // not 0, which was aborted, too
}

TEST(steps_older_than_the_last_64_cannot_be_aborted) {
  StepJournal journal;
  for (int64_t i = 0; i < StepJournal::kMaxStepsInFlight + 10; ++i) step(&journal);
  CHECK_EQ(journal.in_flight().size(), StepJournal::kMaxStepsInFlight);
  CHECK_THROWS(journal.check_may_abort(9), "but it is too old");
  journal.check_may_abort(10);
  journal.abort_from(60);
  step(&journal);
  CHECK_EQ(journal.in_flight().front().id, 11);  // keeps the last 64 step numbers, not 64 steps
}

TEST(an_abort_removes_the_step_and_all_later_steps) {
  StepJournal journal;
  for (int i = 0; i < 4; ++i) {
    journal.begin();
    journal.note_published(i, admitted(i + 1), 0, 0, i + 1, 1);
    journal.note_dropped(i, admitted(i + 1), 0, i + 1);
    journal.note_left(i, admitted(i + 1));
    journal.issue({});
  }
  const auto aborted = journal.abort_from(2);
  CHECK_EQ(aborted.size(), 2);
  CHECK(aborted[0].id == 3 && aborted[1].id == 2);  // newest first
  CHECK_EQ(journal.numbers().last_issued, 1);
  // The notes of the aborted steps are kept in the step before them.
  CHECK_EQ(journal.last().published.size(), 3);
  CHECK_EQ(journal.last().published[1].id, 4);
  CHECK_EQ(journal.last().dropped.size(), 3);
  CHECK_EQ(journal.last().left.size(), 3);
  journal.note_forgotten(aborted[0].left[0], 0, 4);
  CHECK_EQ(journal.last().dropped.back().id, 4);
  CHECK(journal.abort_from(3).empty());  // already aborted
  step(&journal);
  CHECK_EQ(journal.last().id, 4);  // step numbers are not reused
  journal.check_invariants();
}

TEST(a_fork_copies_the_notes_of_its_parent) {
  StepJournal journal;
  journal.begin();
  journal.note_served(0, admitted(1), 4);
  journal.note_served(0, admitted(9), 8);  // the row's next request
  journal.note_swapped(0, admitted(1));
  journal.note_dropped(0, admitted(1), 4, 5);
  journal.note_published(0, admitted(1), 4, 0, 5, 1);
  journal.issue({});
  journal.inherit(0, admitted(1), 3, admitted(12));
  const StepJournal::Step& last = journal.last();
  CHECK_EQ(last.rows.size(), 3);
  CHECK(last.rows[2].row == 3 && last.rows[2].admission == 12 && last.rows[2].start == 4);
  CHECK_EQ(last.swapped.size(), 2);
  CHECK_EQ(last.dropped.size(), 2);
  CHECK_EQ(last.published.size(), 1);  // the parent's note was withdrawn before the copy
}

TEST(unknown_steps_are_rejected) {
  StepJournal journal;
  CHECK_THROWS(journal.check_step_id(0), "step_id is 0: no step has been made");
  step(&journal);
  step(&journal);
  journal.check_step_id(1);
  CHECK_THROWS(journal.check_step_id(2), "step_id is 2: expected 0 to 1");
  CHECK_THROWS(journal.check_step_id(-1), "step_id is -1");
}

}  // namespace

TEST_MAIN()
