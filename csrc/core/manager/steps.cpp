// SPDX-License-Identifier: Apache-2.0
#include "core/manager/steps.h"

#include <array>

#include "core/errors.h"

namespace kvcache {

void Steps::begin() {
  const int64_t previous = journal_.last_kept();
  journal_.begin();
  plan_.begin(numbers().num_steps, previous);
}

const StepPlan& Steps::end(const RowTable& rows) {
  resend_tables(rows);
  const StepPlan& plan = plan_.end();
  journal_.issue(plan.clear_rows);
  return plan;
}

void Steps::resend_tables(const RowTable& rows) {
  static constexpr std::array<int64_t, kMaxGroups> kFromFirst{};
  for (int32_t row : plan_.take_resent()) {
    plan_.clear(row);
    // The table of a row on the host is sent when the row returns.
    if (!rows[row].is_on_host()) plan_.append(row, rows.blocks(row), kFromFirst.data());
  }
}

void Steps::check_invariants() const {
  require(!plan_.is_step(), "a plan was started but not completed");
  plan_.check_invariants();
  journal_.check_invariants();  // throws if a step in the journal was not issued
}

}  // namespace kvcache
