// The worker's native host code for Python. Converts arrays, nothing else.
#include <deque>

#include "python/arrays.h"
#include "worker/host_tables.h"

namespace kvcache {
namespace {

// An array in whose memory the tables work, so it must not be a converted copy.
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

// One group's replacements: int32[n, 3].
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

// Ids of one group, ragged by row, kept alive while the call runs.
struct GroupIds {
  GroupIds(const py::handle& splits, const py::handle& ids, const std::string& g)
      : splits(splits, ("append_splits[" + g + "]").c_str()),
        ids(ids, ("append_ids[" + g + "]").c_str()) {}
  Int32Input splits, ids;
};

// Values that lie in the tables are copied before the tables change.
void let_go(const HostTables& tables, Int32Input* input) {
  if (tables.overlaps(input->data(), input->size())) input->copy_values();
}

void apply(HostTables& self, const py::object& clear_rows, const py::object& append_rows,
           const py::sequence& append_splits, const py::sequence& append_ids,
           const py::sequence& replace, int64_t num_blocks) {
  Int32Input clear(clear_rows, "clear_rows");
  Int32Input append(append_rows, "append_rows");
  let_go(self, &clear);
  let_go(self, &append);
  require_same_length(static_cast<py::ssize_t>(append_splits.size()), "append_splits",
                      static_cast<py::ssize_t>(append_ids.size()), "append_ids");
  std::deque<GroupIds> inputs;  // stays in place as it grows
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
             num_blocks);
}

}  // namespace

void bind_worker(py::module_& m) {
  py::class_<HostTables>(m, "HostTables")
      .def(py::init(
               [](const py::object& arena, int64_t num_rows, const py::list& fields, bool track) {
                 std::vector<TableGroup> groups = table_groups(fields);
                 int64_t size = static_cast<int64_t>(groups.size()) * num_rows;  // the counts
                 for (const TableGroup& group : groups) size += num_rows * group.width;
                 return std::make_unique<HostTables>(shared_int32(arena, "arena", size), num_rows,
                                                     std::move(groups), track);
               }),
           py::arg("arena"), py::arg("num_rows"), py::arg("groups"), py::arg("track"),
           py::keep_alive<1, 2>())
      .def("apply", &apply)
      .def("append_row",
           [](HostTables& self, int64_t group, int64_t row, const py::object& block_ids,
              bool reset) {
             Int32Input ids(block_ids, "block_ids");
             let_go(self, &ids);
             self.append_row(group, row, ids.data(), ids.size(), reset);
           })
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
      .def("mark_clean", &HostTables::mark_clean);
}

}  // namespace kvcache
