// SPDX-License-Identifier: Apache-2.0
// The numbers of the steps that were created, issued and completed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/errors.h"

namespace kvcache {

// Invariant: last_issued < num_steps, num_completed <= num_steps.
struct StepNumbers {
  int64_t num_steps = 0;      // number of the next step, or of the current one
  int64_t last_issued = -1;   // the last issued step that was not aborted
  int64_t num_completed = 0;  // all steps below this number are done

  void issue() { last_issued = num_steps++; }
  void complete(int64_t step_id) { num_completed = std::max(num_completed, step_id + 1); }
  void abort_from(int64_t step_id) { last_issued = std::min(last_issued, step_id - 1); }

  void check_invariants() const {
    require(last_issued < num_steps && num_completed <= num_steps,
            "a step that was never created was issued or completed");
  }
};

}  // namespace kvcache
