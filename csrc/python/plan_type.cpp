// SPDX-License-Identifier: Apache-2.0
// Creates plans for Python. A plan is an instance of the class in kvcache/step.py and has the
// arrays of a `HeldPlan`.
#include "python/plan_type.h"

#include <pybind11/numpy.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <utility>

#include "python/held_plan.h"

namespace kvcache {
namespace {

// The StepPlan class of kvcache/step.py. The native step creates instances and sets their fields by
// name.
class PlanType {
 public:
  // The arrays of empty sections, which all plans share. Shapes: `ids` [0], `splits` [1] (a zero),
  // `pairs` [0, 2], `replace` [0, 3].
  struct EmptySections {
    py::object ids, splits, pairs, replace;
  };

  // The fields that the native step sets. Some are set immediately. The fields of the results are
  // set together at the first access to any of them, and so are the fields of the changes, because
  // usually only a plan's results are read.
  enum Field {
    kStepId,
    kPreviousStepId,
    kIsEmpty,
    kFirstAnswer,
    kNumRunning = kFirstAnswer,
    kNumLeaving,
    kRows,
    kStatus,
    kNumComputedTokens,
    kNumTokens,
    kFirstChange,
    kClearRows = kFirstChange,
    kAppendRows,
    kAppendSplits,
    kAppendIds,
    kReplace,
    kSwapOut,
    kCopy,
    kZero,
    kFresh,
    kSwapIn,
    kNumFields,
  };

  static PlanType& get() {
    static auto* type = new PlanType;  // leaked, because it must outlive the interpreter
    return *type;
  }

  // Raises TypeError if the dataclass lacks a field, or has an additional field without a default.
  void use(const py::type& dataclass, EmptySections sections) {
    static constexpr const char* kNames[kNumFields] = {"step_id",     "previous_step_id",
                                                       "is_empty",    "num_running",
                                                       "num_leaving", "rows",
                                                       "status",      "num_computed_tokens",
                                                       "num_tokens",  "clear_rows",
                                                       "append_rows", "append_splits",
                                                       "append_ids",  "replace",
                                                       "swap_out",    "copy",
                                                       "zero",        "fresh",
                                                       "swap_in"};
    const py::module_ dataclasses = py::module_::import("dataclasses");
    std::vector<std::pair<Slot, py::object>> defaults;
    std::array<Slot, kNumFields> slots;
    for (const py::handle& field : dataclasses.attr("fields")(dataclass)) {
      const py::object name = field.attr("name");
      const auto* known = std::find(kNames, kNames + kNumFields, py::cast<std::string>(name));
      if (known != kNames + kNumFields) {
        slots[static_cast<size_t>(known - kNames)] = slot_of(dataclass, name);
      } else if (field.attr("default").is(dataclasses.attr("MISSING"))) {
        throw py::type_error("field '" + py::cast<std::string>(name) +
                             "' of the plan has no default, and the native step does not set it");
      } else {
        defaults.emplace_back(slot_of(dataclass, name), field.attr("default"));
      }
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].name) continue;
      throw py::type_error(std::string("the plan has no field '") + kNames[i] +
                           "': expected one for everything that the native step sets");
    }
    type_ = dataclass;
    no_arguments_ = py::tuple();
    held_ = slot_of(dataclass, py::str("_held"));
    slots_ = std::move(slots);
    defaults_ = std::move(defaults);
    empty = std::move(sections);
  }

  // Skips __init__, which would take as long as a small step.
  py::object make() const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    auto plan = py::reinterpret_steal<py::object>(type->tp_new(type, no_arguments_.ptr(), nullptr));
    if (!plan) throw py::error_already_set();
    for (const auto& [slot, value] : defaults_) set(plan, slot, value);
    return plan;
  }

  void set(const py::object& plan, Field field, const py::object& value) const {
    set(plan, slots_[field], value);
  }

  // Sets the field unless it was already set.
  void set_missing(const py::object& plan, Field field, const py::object& value) const {
    if (value_of(plan.ptr(), slots_[field]) == nullptr) set(plan, slots_[field], value);
  }

  void hold(const py::object& plan, const py::object& capsule) const { set(plan, held_, capsule); }
  // Returns the plan's capsule as a borrowed reference, or null if the plan was not created by a
  // step.
  PyObject* held(PyObject* plan) const { return value_of(plan, held_); }
  // Returns the field of the results or changes that has this name and is not set yet, or
  // kNumFields.
  Field missing(PyObject* plan, PyObject* name) const {
    for (size_t i = kFirstAnswer; i < slots_.size(); ++i) {
      if (slots_[i].name.ptr() != name) continue;
      return value_of(plan, slots_[i]) == nullptr ? static_cast<Field>(i) : kNumFields;
    }
    return kNumFields;
  }

  // Returns whether none of a plan's changes has been created or assigned yet.
  bool lacks_changes(PyObject* plan) const {
    return std::all_of(slots_.begin() + kFirstChange, slots_.end(), [&](const Slot& slot) {
      return slot.offset >= 0 && value_of(plan, slot) == nullptr;
    });
  }
  // Returns a borrowed reference, or null if the field is not set.
  PyObject* value_of(PyObject* plan, Field field) const { return value_of(plan, slots_[field]); }
  // Returns whether a value is one of the shared arrays for empty sections.
  bool is_shared_empty(PyObject* value) const {
    return value == empty.ids.ptr() || value == empty.pairs.ptr();
  }
  bool is_plan(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type_.ptr();
  }

  EmptySections empty;

 private:
  // A field and its offset in the plan; -1: accessed as an attribute.
  struct Slot {
    py::object name;
    Py_ssize_t offset = -1;
  };

  static Slot slot_of(const py::type& dataclass, const py::handle& name) {
    PyObject* text = name.inc_ref().ptr();
    PyUnicode_InternInPlace(&text);
    Slot out{py::reinterpret_steal<py::object>(text)};
    const py::object member = py::getattr(dataclass, name, py::none());
    if (Py_TYPE(member.ptr()) == &PyMemberDescr_Type) {
      out.offset = reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
    }
    return out;
  }

  // Returns a borrowed reference, or null if the field is not set.
  static PyObject* value_of(PyObject* plan, const Slot& slot) {
    if (slot.offset < 0) return nullptr;
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(plan) + slot.offset);
  }

  // Writes the field in place, which takes a tenth of the time that setting an attribute takes.
  static void set(const py::object& plan, const Slot& slot, const py::object& value) {
    if (slot.offset < 0) {
      if (PyObject_SetAttr(plan.ptr(), slot.name.ptr(), value.ptr()) != 0)
        throw py::error_already_set();
      return;
    }
    auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(plan.ptr()) + slot.offset);
    PyObject* const before = std::exchange(*place, value.inc_ref().ptr());
    Py_XDECREF(before);
  }

  py::object type_;
  Slot held_;
  py::tuple no_arguments_;
  std::array<Slot, kNumFields> slots_;
  std::vector<std::pair<Slot, py::object>> defaults_;  // default values of the remaining fields
};

void set_answers(const PlanType& type, const py::object& out, const py::object& capsule) {
  HeldPlan& held = HeldPlan::of(capsule);
  type.set_missing(out, PlanType::kNumRunning, py::int_(held.num_running()));
  type.set_missing(out, PlanType::kNumLeaving, py::int_(held.num_leaving()));
  type.set_missing(out, PlanType::kRows, held.view(capsule, HeldPlan::kRows));
  type.set_missing(out, PlanType::kStatus, held.status_view(capsule));
  type.set_missing(out, PlanType::kNumComputedTokens,
                   held.view(capsule, HeldPlan::kNumComputedTokens));
  type.set_missing(out, PlanType::kNumTokens, held.view(capsule, HeldPlan::kNumTokens));
}

void set_changes(const PlanType& type, const py::object& out, const py::object& capsule) {
  HeldPlan& held = HeldPlan::of(capsule);
  const PlanType::EmptySections& empty = type.empty;
  const auto ids = [&](int section) {
    return held.is_empty(section) ? empty.ids : held.view(capsule, section);
  };
  const auto pairs = [&](int section) {
    return held.is_empty(section) ? empty.pairs : held.view(capsule, section, 2);
  };
  py::list splits(held.num_groups()), new_ids(held.num_groups()), replace(held.num_groups());
  for (size_t g = 0; g < held.num_groups(); ++g) {
    const int replaced = HeldPlan::in_group(g, HeldPlan::kReplace);
    splits[g] = held.is_empty(HeldPlan::kAppendRows)
                    ? empty.splits
                    : held.view(capsule, HeldPlan::in_group(g, HeldPlan::kAppendSplits));
    new_ids[g] = ids(HeldPlan::in_group(g, HeldPlan::kAppendIds));
    replace[g] = held.is_empty(replaced) ? empty.replace : held.view(capsule, replaced, 3);
  }
  type.set_missing(out, PlanType::kClearRows, ids(HeldPlan::kClearRows));
  type.set_missing(out, PlanType::kAppendRows, ids(HeldPlan::kAppendRows));
  type.set_missing(out, PlanType::kAppendSplits, splits);
  type.set_missing(out, PlanType::kAppendIds, new_ids);
  type.set_missing(out, PlanType::kReplace, replace);
  type.set_missing(out, PlanType::kSwapOut, pairs(HeldPlan::kSwapOut));
  type.set_missing(out, PlanType::kCopy, pairs(HeldPlan::kCopy));
  type.set_missing(out, PlanType::kZero, ids(HeldPlan::kZero));
  type.set_missing(out, PlanType::kFresh, ids(HeldPlan::kFresh));
  type.set_missing(out, PlanType::kSwapIn, pairs(HeldPlan::kSwapIn));
}

py::object interned(PyObject* name) {
  PyObject* out = name;
  Py_INCREF(out);
  if (PyUnicode_CheckExact(out) && !PyUnicode_CHECK_INTERNED(out)) PyUnicode_InternInPlace(&out);
  return py::reinterpret_steal<py::object>(out);
}

// Returns an attribute of a plan. The first access to an array creates all arrays of the same kind.
PyObject* plan_attribute(PyObject* self, PyObject* given) {
  const PlanType& type = PlanType::get();
  // Fields are compared by the identity of their interned names.
  const auto name = interned(given);
  const PlanType::Field field = type.missing(self, name.ptr());
  PyObject* const held = field == PlanType::kNumFields ? nullptr : type.held(self);
  if (held != nullptr) {
    try {
      const auto plan = py::reinterpret_borrow<py::object>(self);
      const auto capsule = py::reinterpret_borrow<py::object>(held);
      (field < PlanType::kFirstChange ? set_answers : set_changes)(type, plan, capsule);
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
  return PyObject_GenericGetAttr(self, name.ptr());
}

// The base class of StepPlan.
py::object held_arrays_type() {
  PyType_Slot slots[] = {{Py_tp_getattro, reinterpret_cast<void*>(&plan_attribute)}, {0, nullptr}};
  PyType_Spec spec{"kvcache._core.HeldArrays", sizeof(PyObject), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  return type;
}

}  // namespace

// The arrays are created by `plan_attribute`.
py::object as_plan(const StepPlan& plan) {
  const PlanType& type = PlanType::get();
  py::object out = type.make();
  type.set(out, PlanType::kStepId, py::int_(plan.step_id));
  type.set(out, PlanType::kPreviousStepId, py::int_(plan.previous_step_id));
  type.set(out, PlanType::kIsEmpty, py::bool_(plan.is_empty()));
  type.hold(out, HeldPlan::capsule_of(plan));
  return out;
}

py::object untouched_changes(const py::object& plan) {
  const PlanType& type = PlanType::get();
  if (!type.is_plan(plan.ptr()) || !type.lacks_changes(plan.ptr())) return {};
  return py::reinterpret_borrow<py::object>(type.held(plan.ptr()));
}

PlanWork work_of(const py::object& plan, bool clears) {
  const PlanType& type = PlanType::get();
  if (!type.is_plan(plan.ptr())) return PlanWork::kPages;
  PyObject* const capsule = type.held(plan.ptr());
  const HeldPlan* held =
      capsule == nullptr ? nullptr : &HeldPlan::of(py::reinterpret_borrow<py::object>(capsule));
  const auto is_empty = [&](PlanType::Field field, int section) {
    PyObject* const value = type.value_of(plan.ptr(), field);
    if (value != nullptr) return type.is_shared_empty(value);
    return held != nullptr && held->is_empty(section);
  };
  if (!is_empty(PlanType::kSwapOut, HeldPlan::kSwapOut) ||
      !is_empty(PlanType::kCopy, HeldPlan::kCopy) || !is_empty(PlanType::kZero, HeldPlan::kZero) ||
      !is_empty(PlanType::kSwapIn, HeldPlan::kSwapIn) ||
      (clears && !is_empty(PlanType::kFresh, HeldPlan::kFresh))) {
    return PlanWork::kPages;
  }
  if (held == nullptr || !type.lacks_changes(plan.ptr()) || !held->is_empty(HeldPlan::kClearRows) ||
      !held->is_empty(HeldPlan::kAppendRows)) {
    return PlanWork::kTables;
  }
  for (size_t g = 0; g < held->num_groups(); ++g) {
    if (!held->is_empty(HeldPlan::in_group(g, HeldPlan::kReplace))) return PlanWork::kTables;
  }
  return PlanWork::kNone;
}

void bind_plan(py::module_& m) {
  m.def(
      "use_plan_type",
      [](const py::type& plan, const py::object& ids, const py::object& splits,
         const py::object& pairs,
         const py::object& replace) { PlanType::get().use(plan, {ids, splits, pairs, replace}); },
      py::arg("plan"), py::arg("no_ids"), py::arg("no_splits"), py::arg("no_pairs"),
      py::arg("no_replace"));
  m.def("plan_work", [](const py::object& plan, bool clears) {
    return static_cast<int>(work_of(plan, clears));
  });
  m.attr("HeldArrays") = held_arrays_type();
}

}  // namespace kvcache
