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

// The native arrays of a plan of which no change has been created as a Python array or assigned.
// Null for any other plan. Valid while the plan is alive.
class HeldPlan;
const HeldPlan* untouched_changes(const py::object& plan);

}  // namespace kvcache
