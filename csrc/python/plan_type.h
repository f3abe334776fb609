// SPDX-License-Identifier: Apache-2.0
// Creates plans for Python, as objects of the class that `use_plan_type` registered.
#pragma once

#include <pybind11/pybind11.h>

#include "core/manager/step_plan.h"

namespace kvcache {

namespace py = pybind11;

// Returns a plan whose arrays are created on demand.
py::object as_plan(const StepPlan& plan);

// Returns the `HeldPlan` capsule of a plan if none of its changes has been created as a Python
// array or assigned. Returns null for any other plan.
py::object untouched_changes(const py::object& plan);

// What a worker must do for a plan: nothing, update tables, or also move pages. A section that was
// assigned counts as work. `clears`: whether the worker clears fresh pages.
enum class PlanWork { kNone, kTables, kPages };
PlanWork work_of(const py::object& plan, bool clears);

}  // namespace kvcache
