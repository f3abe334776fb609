// SPDX-License-Identifier: Apache-2.0
// Plans for Python, as objects of the class registered by `use_plan_type`.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "core/hash.h"
#include "core/manager/step_plan.h"

namespace kvcache {

namespace py = pybind11;

// Returns a plan whose arrays are created on demand.
py::object as_plan(const StepPlan& plan);

// The `HeldPlan` capsule of a plan whose changes have not been created as Python arrays or
// assigned. Null for any other plan.
py::object untouched_changes(const py::object& plan);

// What a worker has to do for a plan. A section that was assigned counts as work.
enum class PlanWork { kNone, kTables, kPages };
PlanWork work_of(const py::object& plan);

}  // namespace kvcache
