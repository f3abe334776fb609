// The plan of the step that is being made, and the journal of those in flight.
//
// Invariant: outside of a step no plan is being made, and all steps of the journal were issued.
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
  // `num_blocks`: of the device's pool.
  Steps(size_t num_groups, int64_t num_blocks) : plan_(num_groups, num_blocks) {}

  PlanBuilder& plan() { return plan_; }
  const PlanBuilder& plan() const { return plan_; }
  StepJournal& journal() { return journal_; }
  const StepJournal& journal() const { return journal_; }
  const StepNumbers& numbers() const { return journal_.numbers(); }

  // Opens the plan and the journal of the next step.
  void begin();
  // Issues the step. Its plan, with the tables that are to be sent anew; valid until the next
  // `begin`.
  const StepPlan& end(const RowTable& rows);

  // Throws std::logic_error.
  void check_invariants() const;

 private:
  void resend_tables(const RowTable& rows);

  PlanBuilder plan_;
  StepJournal journal_;
};

}  // namespace kvcache
