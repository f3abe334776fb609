// SPDX-License-Identifier: Apache-2.0
// Python bindings of the worker's native host code. The bindings only convert arguments and
// results.
#include <deque>

#include "python/arrays.h"
#include "python/construct.h"
#include "python/fast_method.h"
#include "python/held_plan.h"
#include "python/plan_type.h"
#include "worker/host_slots.h"
#include "worker/host_tables.h"

namespace kvcache {
namespace {

// Returns the array's memory. The tables use this memory, so the array must not be a converted
// copy.
int32_t* shared_int32(const py::object& value, const char* name, int64_t size) {
  if (!py::isinstance<Int32Array>(value)) {
    throw py::type_error(std::string(name) + ": expected a C-contiguous int32 array");
  }
  auto array = py::reinterpret_borrow<Int32Array>(value);
  if (array.size() != size) {
    throw py::value_error(std::string(name) + " has " + std::to_string(array.size()) +
                          " entries: expected " + std::to_string(size));
  }
  return array.mutable_data();
}

std::vector<TableGroup> table_groups(const py::list& fields) {
  std::vector<TableGroup> groups;
  for (const py::handle& item : fields) {
    const auto [offset, width, ratio, max_ids] =
        py::cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>(item);
    groups.push_back({offset, width, ratio, max_ids});
  }
  return groups;
}

// Converts the replacements of one group, int32[n, 3].
Int32Array replacements_of(const py::handle& value, size_t g) {
  const std::string name = "replace[" + std::to_string(g) + "]";
  if (!py::isinstance<Int32Array>(value)) {
    throw py::type_error(name + ": expected a C-contiguous int32 array");
  }
  auto array = py::reinterpret_borrow<Int32Array>(value);
  if (array.ndim() != 2 || array.shape(1) != 3) {
    throw py::value_error(name + ": expected an array of shape [n, 3]");
  }
  return array;
}

// One group's ids, as a ragged array with one list per row. They are kept alive during the call.
struct GroupIds {
  GroupIds(const py::handle& splits, const py::handle& ids, const std::string& g)
      : splits(splits, ("append_splits[" + g + "]").c_str()),
        ids(ids, ("append_ids[" + g + "]").c_str()) {}
  Int32Input splits, ids;
};

// Checks the length of ids for a row before they are converted. A value without a length is left to
// the conversion.
void check_room(const HostTables& self, int64_t group, const py::object& row,
                const py::object& block_ids, bool reset) {
  const Py_ssize_t size = PyObject_Size(block_ids.ptr());
  if (size < 0) return PyErr_Clear();
  self.check_room(group, int_argument(row, "row"), size, reset);
}

// If the input's values are stored in the tables' own memory, copies them before the tables change.
void let_go(const HostTables& tables, Int32Input* input) {
  if (tables.overlaps(input->data(), input->size())) input->copy_values();
}

// Reads a section of a plan that has one entry per group.
py::sequence per_group(const py::object& value, const char* name) {
  if (!PySequence_Check(value.ptr()) || PyUnicode_Check(value.ptr()) ||
      PyBytes_Check(value.ptr())) {
    throw py::type_error(std::string(name) + " is " + short_repr(value) +
                         ": expected a list with one entry per group");
  }
  check_num_entries(value, name);
  return py::reinterpret_borrow<py::sequence>(value);
}

void apply(HostTables& self, const py::object& clear_rows, const py::object& append_rows,
           const py::object& splits_of_groups, const py::object& ids_of_groups,
           const py::object& replace_of_groups, const py::object& num_blocks, HostSlots* slots) {
  const py::sequence append_splits = per_group(splits_of_groups, "append_splits");
  const py::sequence append_ids = per_group(ids_of_groups, "append_ids");
  const py::sequence replace = per_group(replace_of_groups, "replace");
  Int32Input clear(clear_rows, "clear_rows");
  Int32Input append(append_rows, "append_rows");
  let_go(self, &clear);
  let_go(self, &append);
  require_same_length(static_cast<py::ssize_t>(append_splits.size()), "append_splits",
                      static_cast<py::ssize_t>(append_ids.size()), "append_ids");
  std::deque<GroupIds> inputs;  // a deque, so that references stay valid when it grows
  std::vector<RaggedIds> ragged;
  for (size_t g = 0; g < append_ids.size(); ++g) {
    GroupIds& in = inputs.emplace_back(append_splits[g], append_ids[g], std::to_string(g));
    let_go(self, &in.splits);
    let_go(self, &in.ids);
    ragged.push_back({in.splits.data(), in.ids.data(), in.splits.size(), in.ids.size()});
  }
  std::vector<Int32Array> entries;
  std::vector<Replacements> replacements;
  for (size_t g = 0; g < replace.size(); ++g) {
    entries.push_back(replacements_of(replace[g], g));
    Int32Array& array = entries.back();
    if (self.overlaps(array.data(), array.size())) array = Int32Array(array.request());
    replacements.push_back({array.data(), array.shape(0)});
  }
  self.apply(clear.data(), clear.size(), append.data(), append.size(), ragged, replacements,
             int_argument(num_blocks, "num_blocks"));
  if (slots != nullptr) slots->begin_step();
}

// Applies a plan's table changes. If none of the plan's arrays has been created or assigned in
// Python, the changes are read where the step stored them. If `num_applied` is not -1 and other
// plans were applied since that number was read, returns false without changing anything.
bool apply_plan(HostTables& self, const py::object& plan, const py::object& num_blocks,
                HostSlots* slots, int64_t num_applied) {
  // May run Python code, so the plan is read only afterwards.
  const int64_t num_ids = int_argument(num_blocks, "num_blocks");
  if (num_applied >= 0 && self.num_applied() != num_applied) return false;
  const py::object capsule = untouched_changes(plan);
  if (!capsule) {
    apply(self, plan.attr("clear_rows"), plan.attr("append_rows"), plan.attr("append_splits"),
          plan.attr("append_ids"), plan.attr("replace"), py::int_(num_ids), slots);
    return true;
  }
  const HeldPlan* held = &HeldPlan::of(capsule);
  static constexpr int32_t kNoSplits[] = {0};
  const int64_t num_rows = held->size(HeldPlan::kAppendRows);
  std::vector<RaggedIds> ragged;
  std::vector<Replacements> replacements;
  for (size_t g = 0; g < held->num_groups(); ++g) {
    const int ids = HeldPlan::in_group(g, HeldPlan::kAppendIds);
    const int splits = HeldPlan::in_group(g, HeldPlan::kAppendSplits);
    const int replaced = HeldPlan::in_group(g, HeldPlan::kReplace);
    ragged.push_back({num_rows > 0 ? held->data(splits) : kNoSplits, held->data(ids), num_rows + 1,
                      held->size(ids)});
    replacements.push_back({held->data(replaced), held->size(replaced) / 3});
  }
  self.apply(held->data(HeldPlan::kClearRows), held->size(HeldPlan::kClearRows),
             held->data(HeldPlan::kAppendRows), num_rows, ragged, replacements, num_ids);
  if (slots != nullptr) slots->begin_step();
  return true;
}

using Int64Array = py::array_t<int64_t, py::array::c_style>;

// Converts the groups that have slots. Each is given by numbers in the order of GroupField.
std::vector<TableGroupView> table_views(const py::list& fields) {
  std::vector<TableGroupView> views;
  for (const py::handle& item : fields) {
    std::vector<int64_t> numbers;
    for (const py::handle& number : item) numbers.push_back(py::cast<int64_t>(number));
    if (numbers.size() != kNumFields)
      throw py::value_error("a group has the wrong number of fields");
    views.push_back(table_view(numbers.data()));
  }
  return views;
}

std::shared_ptr<HostSlots> make_host_slots(const py::object& arena, const py::object& counts,
                                           int64_t num_rows, const py::list& fields,
                                           int64_t num_shared, const py::array& slots,
                                           int64_t num_slots, bool one_memory) {
  const auto tables = py::cast<Int32Array>(arena), held = py::cast<Int32Array>(counts);
  std::vector<TableGroupView> views = table_views(fields);
  if (slots.size() != static_cast<py::ssize_t>(views.size()) * num_slots) {
    throw py::value_error("slots: expected num_slots entries per group");
  }
  auto made = std::make_unique<HostSlots>(tables.data(), held.data(), num_rows, std::move(views),
                                          num_shared, const_cast<void*>(slots.data()), num_slots,
                                          slots.itemsize() == sizeof(int64_t), one_memory);
  return over(std::move(made), arena, counts, py::object(slots));
}

// Returns the data of a one-dimensional array with this type, or null for any other object.
template <class Array>
auto data_of(py::handle value, int64_t* size) -> decltype(Array().data()) {
  using Data = decltype(Array().data());
  // A match with numpy's type number, in native byte order, makes the general check unnecessary.
  static const int type_number =
      py::dtype::of<std::remove_const_t<std::remove_pointer_t<Data>>>().num();
  if (!py::isinstance<py::array>(value)) return nullptr;
  const py::detail::PyArray_Proxy* array = py::detail::array_proxy(value.ptr());
  const auto* dtype = py::detail::array_descriptor_proxy(array->descr);
  const bool is_plain = dtype->type_num == type_number && dtype->byteorder == '=' &&
                        py::detail::check_flags(value.ptr(), py::array::c_style);
  if (!is_plain && !py::isinstance<Array>(value)) return nullptr;
  if (array->nd != 1) return nullptr;
  *size = array->dimensions[0];
  return reinterpret_cast<Data>(array->data);
}

// The arguments of a slot mapping. Null rows or positions must be converted first.
struct SlotArguments {
  SlotArguments(py::handle row_values, py::handle position_values, py::handle query_start_loc)
      : rows(data_of<Int32Array>(row_values, &num_rows)),
        positions(data_of<Int64Array>(position_values, &num_tokens)) {
    if (rows == nullptr || positions == nullptr) return;
    if (query_start_loc.is_none()) {
      require_same_length(num_rows, "req_indices", num_tokens, "positions");
      return;
    }
    int64_t num_starts = 0;
    starts = data_of<Int32Array>(query_start_loc, &num_starts);
    if (starts == nullptr) {
      rows = nullptr;
    } else if (num_starts != num_rows + 1) {
      throw py::value_error("query_start_loc has " + std::to_string(num_starts) +
                            " entries: expected " + std::to_string(num_rows + 1) +
                            ", one more than req_indices has");
    }
  }
  bool are_given() const { return rows != nullptr && positions != nullptr; }

  int64_t num_rows = 0, num_tokens = 0;
  const int32_t* rows;
  const int64_t* positions;
  const int32_t* starts = nullptr;
};

[[noreturn]] void fail_slots(std::string wrong) {
  const std::string name = "rows[";  // prefix of the op's error messages
  if (wrong.compare(0, name.size(), name) == 0) wrong.replace(0, name.size(), "req_indices[");
  throw py::value_error(wrong);
}

// Computes slots for the arguments (place, rows, positions, query_start_loc). If arrays must be
// converted first, returns False and has no other effect.
PyObject* compute_slots(HostSlots& self, PyObject* const* args) {
  const int64_t place = py::cast<int64_t>(py::handle(args[0]));
  const SlotArguments in(args[1], args[2], args[3]);
  if (!in.are_given()) Py_RETURN_FALSE;
  if (in.num_tokens > self.num_slots()) {
    throw py::value_error("positions has " + std::to_string(in.num_tokens) +
                          " entries: expected at most " + std::to_string(self.num_slots()) +
                          ", the tokens of a step (max_num_batched_tokens)");
  }
  if (self.overlaps(in.rows, 4 * in.num_rows) || self.overlaps(in.positions, 8 * in.num_tokens) ||
      (in.starts != nullptr && self.overlaps(in.starts, 4 * (in.num_rows + 1)))) {
    throw py::value_error("an argument shares memory with the slot mapping: expected its own");
  }
  const auto wrong =
      self.compute(place, in.rows, in.num_rows, in.starts, in.positions, in.num_tokens);
  if (wrong) fail_slots(*wrong);
  Py_RETURN_TRUE;
}

// Returns int64[n] in new memory. The arrays must have the expected types.
Int64Array slots_of(const HostSlots& self, int64_t place, const py::object& rows,
                    const py::object& positions, const py::object& query_start_loc) {
  const SlotArguments in(rows, positions, query_start_loc);
  if (!in.are_given()) throw py::type_error("expected arrays of int32, int64 and int32");
  auto out = new_array<int64_t>(in.num_tokens);
  const auto wrong = self.compute_into(place, in.rows, in.num_rows, in.starts, in.positions,
                                       in.num_tokens, out.mutable_data());
  if (wrong) fail_slots(*wrong);
  return out;
}

PyObject* commit_slots(HostSlots& self, PyObject* const* args) {
  const int64_t place = py::cast<int64_t>(py::handle(args[0]));
  const int64_t n = int_argument(py::handle(args[1]), "num_tokens");
  if (n < 0 || n > self.num_slots()) {
    throw py::value_error("num_tokens is " + std::to_string(n) + ": expected 0 to " +
                          std::to_string(self.num_slots()));
  }
  self.commit(place, n);
  Py_RETURN_NONE;
}

void bind_slots(py::module_& m) {
  py::class_<HostSlots, std::shared_ptr<HostSlots>> type(m, "HostSlots");
  def_fast<HostSlots, 4, &compute_slots>(type, "compute");
  def_fast<HostSlots, 2, &commit_slots>(type, "commit");
  def_init(type, &make_host_slots, py::arg("tables"), py::arg("counts"), py::arg("num_rows"),
           py::arg("groups"), py::arg("num_shared"), py::arg("slots"), py::arg("num_slots"),
           py::arg("one_memory"))
      .def("slots_of", &slots_of)
      .def("note_on_device", &HostSlots::note_on_device)
      .def("begin_step", &HostSlots::begin_step)
      .def("num_on_device", &HostSlots::num_on_device);
}

}  // namespace

void bind_worker(py::module_& m) {
  bind_slots(m);
  def_init(
      py::class_<HostTables, std::shared_ptr<HostTables>>(m, "HostTables"),
      [](const py::object& arena, int64_t num_rows, const py::list& fields, bool track) {
        std::vector<TableGroup> groups = table_groups(fields);
        int64_t size = static_cast<int64_t>(groups.size()) * num_rows;  // the counts' size
        for (const TableGroup& group : groups) size += num_rows * group.width;
        return over(std::make_unique<HostTables>(shared_int32(arena, "arena", size), num_rows,
                                                 std::move(groups), track),
                    arena);
      },
      py::arg("arena"), py::arg("num_rows"), py::arg("groups"), py::arg("track"))
      .def("apply", &apply, py::arg("clear_rows"), py::arg("append_rows"), py::arg("append_splits"),
           py::arg("append_ids"), py::arg("replace"), py::arg("num_blocks"),
           py::arg("slots") = nullptr)
      .def("apply_plan", &apply_plan, py::arg("plan"), py::arg("num_blocks"), py::arg("slots"),
           py::arg("num_applied"))
      .def("append_row",
           [](HostTables& self, int64_t group, const py::object& row, const py::object& block_ids,
              bool reset) {
             check_room(self, group, row, block_ids, reset);
             Int32Input ids(block_ids, "block_ids");
             let_go(self, &ids);
             self.append_row(group, int_argument(row, "row"), ids.data(), ids.size(), reset);
           })
      .def("check_room", &check_room)
      .def("move_rows",
           [](HostTables& self, const py::object& src, const py::object& tgt, int64_t group) {
             Int32Input a(src, "src"), b(tgt, "tgt");
             let_go(self, &a);
             let_go(self, &b);
             require_same_length(a.size(), "src", b.size(), "tgt");
             self.move_rows(a.data(), b.data(), a.size(), group);
           })
      .def("swap_rows",
           [](HostTables& self, const py::object& src, const py::object& tgt, int64_t group) {
             Int32Input a(src, "src"), b(tgt, "tgt");
             let_go(self, &a);
             let_go(self, &b);
             require_same_length(a.size(), "src", b.size(), "tgt");
             self.swap_rows(a.data(), b.data(), a.size(), group);
           })
      .def("clear_rows",
           [](HostTables& self, const py::object& rows, int64_t group) {
             Int32Input r(rows, "rows");
             let_go(self, &r);
             self.clear_rows(r.data(), r.size(), group);
           })
      .def("clear", &HostTables::clear)
      .def("pack",
           [](HostTables& self, const py::object& out) {
             auto array = py::reinterpret_borrow<Int32Array>(out);
             return self.pack(array.mutable_data(), array.size());
           })
      .def("mark_clean", &HostTables::mark_clean)
      .def("mark_sent", &HostTables::mark_sent)
      .def("is_group_changed", [](const HostTables& self, int64_t g) { return self.is_changed(g); })
      .def_property_readonly("is_changed", [](const HostTables& self) { return self.is_changed(); })
      .def_property_readonly("num_applied", &HostTables::num_applied);
}

}  // namespace kvcache
