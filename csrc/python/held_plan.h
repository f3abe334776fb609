// SPDX-License-Identifier: Apache-2.0
// The arrays of a step's plan, in one allocation that a Python capsule owns. The numpy arrays are
// views and are created on demand, because most plans are read only in part, and many are not read
// at all.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/manager/step_plan.h"
#include "python/arrays.h"

namespace kvcache {

namespace py = pybind11;

class HeldPlan {
 public:
  // The arrays, in storage order. Arrays for all groups come first, followed by the arrays of each
  // group.
  enum Section {
    kRows,
    kNumComputedTokens,
    kNumTokens,
    kClearRows,
    kAppendRows,
    kSwapOut,
    kCopy,
    kZero,
    kFresh,
    kSwapIn,
    kFirstOfGroup,
  };
  enum GroupSection { kAppendSplits, kAppendIds, kReplace, kNumOfGroup };

  static py::object capsule_of(const StepPlan& plan) {
    auto held = std::make_unique<HeldPlan>(plan);
    PyObject* capsule = PyCapsule_New(held.get(), kName, [](PyObject* self) {
      delete static_cast<HeldPlan*>(PyCapsule_GetPointer(self, kName));
    });
    if (capsule == nullptr) throw py::error_already_set();
    held.release();
    return py::reinterpret_steal<py::object>(capsule);
  }
  static HeldPlan& of(const py::object& capsule) {
    void* held = PyCapsule_GetPointer(capsule.ptr(), kName);
    if (held == nullptr) throw py::error_already_set();
    return *static_cast<HeldPlan*>(held);
  }

  explicit HeldPlan(const StepPlan& plan)
      : num_groups_(plan.groups.size()),
        num_status_(plan.status.size()),
        num_running_(plan.num_running),
        num_leaving_(plan.num_leaving) {
    const size_t num_sections = kFirstOfGroup + num_groups_ * kNumOfGroup;
    size_t size = num_sections + 1;
    for_each(plan, [&](const std::vector<int32_t>& values) { size += values.size(); });
    words_.reset(new int32_t[size + (num_status_ + 3) / 4]);
    int32_t* start = words_.get();
    auto at = static_cast<int32_t>(num_sections + 1);
    *start++ = at;
    for_each(plan, [&](const std::vector<int32_t>& values) {
      std::copy(values.begin(), values.end(), words_.get() + at);
      *start++ = at += static_cast<int32_t>(values.size());
    });
    std::copy(plan.status.begin(), plan.status.end(), status());
  }

  size_t num_groups() const { return num_groups_; }
  int64_t num_running() const { return num_running_; }
  int64_t num_leaving() const { return num_leaving_; }
  static int in_group(size_t group, GroupSection section) {
    return kFirstOfGroup + static_cast<int>(group) * kNumOfGroup + section;
  }
  // Returns a view, int32[size] or int32[size / width, width]. It keeps `capsule` alive, which must
  // be the plan's capsule.
  py::object view(const py::object& capsule, int section, py::ssize_t width = 0) {
    const int32_t first = words_[section], size = words_[section + 1] - first;
    return width == 0 ? view_of(words_.get() + first, {size}, capsule)
                      : view_of(words_.get() + first, {size / width, width}, capsule);
  }
  bool is_empty(int section) const { return words_[section] == words_[section + 1]; }
  const int32_t* data(int section) const { return words_.get() + words_[section]; }
  int64_t size(int section) const { return words_[section + 1] - words_[section]; }
  py::object status_view(const py::object& capsule) {
    return view_of(status(), {static_cast<py::ssize_t>(num_status_)}, capsule);
  }

 private:
  static constexpr const char* kName = "kvcache.HeldPlan";

  template <class Visit>
  static void for_each(const StepPlan& plan, const Visit& visit) {
    for (const auto* values :
         {&plan.rows, &plan.num_computed_tokens, &plan.num_tokens, &plan.clear_rows,
          &plan.append_rows, &plan.swap_out, &plan.copy, &plan.zero, &plan.fresh, &plan.swap_in}) {
      visit(*values);
    }
    for (const StepPlan::Group& group : plan.groups) {
      visit(group.append_splits);
      visit(group.append_ids);
      visit(group.replace);
    }
  }
  uint8_t* status() {
    const size_t last = kFirstOfGroup + num_groups_ * kNumOfGroup;
    return reinterpret_cast<uint8_t*>(words_.get() + words_[last]);
  }

  size_t num_groups_, num_status_;
  int64_t num_running_, num_leaving_;
  // The start of each section, followed by the sections and the status bytes.
  std::unique_ptr<int32_t[]> words_;
};

}  // namespace kvcache
