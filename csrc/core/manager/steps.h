// SPDX-License-Identifier: Apache-2.0
// The plan of the current step, and the journal of the steps in flight.
//
// Invariant: outside of a step, no plan is open, and all steps in the journal were issued.
#pragma once

#include <cstddef>
#include <cstdint>

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
  void begin();
  // Issues the step. Returns its plan, including complete tables to send. The plan is valid until
  // the next `begin`.
  const StepPlan& end(const RowTable& rows);

  // Throws std::logic_error.
  void check_invariants() const;

 private:
  void resend_tables(const RowTable& rows);

  PlanBuilder plan_;
  StepJournal journal_;
};

}  // namespace kvcache
