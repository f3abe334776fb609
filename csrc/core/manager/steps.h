// SPDX-License-Identifier: Apache-2.0
// The plan of the current step, and the journal of the steps in flight.
//
// Invariant: outside of a step, no plan is open, and all steps in the journal were issued.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/manager/plan_builder.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/manager/step_plan.h"

namespace kvcache {

class Steps {
 public:
  // `num_blocks`: blocks of the device pool.
  Steps(size_t num_groups, int64_t num_blocks) : plan_(num_groups, num_blocks) {}

  PlanBuilder& plan() { return plan_; }
  const PlanBuilder& plan() const { return plan_; }
  StepJournal& journal() { return journal_; }
  const StepJournal& journal() const { return journal_; }
  const StepNumbers& numbers() const { return journal_.numbers(); }

  // Opens the plan and the journal entry of the next step.
  void begin() {
    const int64_t previous = journal_.last_kept();
    journal_.begin();
    plan_.begin(numbers().num_steps, previous);
  }
  // Issues the step. Returns its plan, including complete tables to send. The plan is valid until
  // the next `begin`.
  const StepPlan& end(const RowTable& rows) {
    resend_tables(rows);
    const StepPlan& plan = plan_.end();
    journal_.issue(plan.clear_rows);
    return plan;
  }

  // Throws std::logic_error.
  void check_invariants() const {
    require(!plan_.is_step(), "a plan was started but not completed");
    plan_.check_invariants();
    journal_.check_invariants();  // throws if a step in the journal was not issued
  }

 private:
  void resend_tables(const RowTable& rows) {
    static constexpr std::array<int64_t, kMaxGroups> kFromFirst{};
    for (int32_t row : plan_.take_resent()) {
      plan_.clear(row);
      // The table of a row on the host is sent when the row returns.
      if (!rows[row].is_on_host()) plan_.append(row, rows.blocks(row), kFromFirst.data());
    }
  }

  PlanBuilder plan_;
  StepJournal journal_;
};

}  // namespace kvcache
