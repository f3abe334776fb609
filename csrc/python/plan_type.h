// Plans for Python, as objects of the class that `use_plan_type` was told of.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "core/hash.h"
#include "core/manager/step_plan.h"

namespace kvcache {

namespace py = pybind11;

// A plan whose arrays are made when they are asked for.
py::object as_plan(const StepPlan& plan);

}  // namespace kvcache
