// SPDX-License-Identifier: Apache-2.0
// Binds a manager's options for Python, field by field.
#include "core/manager/options.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/eviction/registry.h"
#include "python/arrays.h"
#include "python/construct.h"

namespace kvcache {
namespace {

using Binding = py::class_<ManagerOptions>;

void bind_size(Binding& binding, const char* name, int64_t ManagerOptions::* field) {
  binding.def_property(
      name, [field](const ManagerOptions& self) { return self.*field; },
      [field, name](ManagerOptions& self, const py::object& value) {
        self.*field = int_argument(value, name);
      });
}

// Binds a size that, if not set, is None in Python and 0 in C++.
void bind_optional_size(Binding& binding, const char* name, int64_t ManagerOptions::* field) {
  binding.def_property(
      name,
      [field](const ManagerOptions& self) -> py::object {
        if (self.*field == 0) return py::none();
        return py::int_(self.*field);
      },
      [field, name](ManagerOptions& self, const py::object& value) {
        self.*field = value.is_none() ? 0 : checked_size(name, int_argument(value, name), 1);
      });
}

std::vector<GroupOptions> groups_of_tuples(const py::list& tuples) {
  std::vector<GroupOptions> out;
  for (const py::handle& each : tuples) {
    const auto group = py::cast<py::tuple>(each);
    out.push_back({py::cast<std::shared_ptr<AttentionKind>>(group[0]),
                   int_argument(group[1], "block_size"), py::cast<bool>(group[2]),
                   py::cast<bool>(group[3]), py::cast<bool>(group[4])});
  }
  return out;
}

}  // namespace

void bind_options(py::module_& m) {
  py::class_<Eviction> eviction(m, "Eviction");
  def_init(eviction, [] { return std::make_unique<Eviction>(); });
  def_init(
      eviction,
      [](const std::string& policy, const std::map<std::string, double>& options) {
        // Called only to raise the error for invalid options.
        make_eviction_policy(policy, options, /*num_blocks=*/2);
        return std::make_unique<Eviction>(Eviction{policy, options, /*make=*/{}});
      },
      py::arg("policy"), py::arg("options"))
      .def_static(
          "for_host",
          [](const std::string& policy, const std::map<std::string, double>& options) {
            check_host_eviction(policy, options);
            return Eviction{policy, options, /*make=*/{}};
          },
          py::arg("policy"), py::arg("options"))
      .def_readonly("policy", &Eviction::policy)
      .def_readonly("options", &Eviction::options);
  Binding options(m, "ManagerOptions");
  def_init(options, [] {
    return std::make_unique<ManagerOptions>();
  }).def("check_optional", &check_optional);
  options.def_property("groups", nullptr, [](ManagerOptions& self, const py::list& tuples) {
    // Reads a tuple (kind, tokens per block, drafts, cached, transferred) for each group.
    self.groups = groups_of_tuples(tuples);
  });
  bind_size(options, "num_gpu_blocks", &ManagerOptions::num_blocks);
  bind_size(options, "max_model_len", &ManagerOptions::max_model_len);
  bind_optional_size(options, "hash_block_size", &ManagerOptions::hash_block_size);
  bind_size(options, "hash_bytes", &ManagerOptions::hash_bytes);
  bind_size(options, "num_preallocate_tokens", &ManagerOptions::num_preallocate_tokens);
  bind_optional_size(options, "max_num_reqs", &ManagerOptions::max_num_reqs);
  options.def_property(  // None: dense
      "retention_interval",
      [](const ManagerOptions& self) -> py::object {
        if (self.retention_interval < 0) return py::none();
        return py::int_(self.retention_interval);
      },
      [](ManagerOptions& self, const py::object& value) {
        self.retention_interval =
            value.is_none()
                ? -1
                : checked_size("retention_interval", int_argument(value, "retention_interval"), 0);
      });
  bind_size(options, "watermark_blocks", &ManagerOptions::watermark_blocks);
  bind_optional_size(options, "explain_misses", &ManagerOptions::explain_misses);
  bind_size(options, "num_host_blocks", &ManagerOptions::num_host_blocks);
  options.def_readwrite("enable_caching", &ManagerOptions::enable_caching)
      .def_readwrite("fence_frees", &ManagerOptions::fence_frees)
      .def_readwrite("enable_events", &ManagerOptions::record_events)
      .def_readwrite("prefault", &ManagerOptions::prefault)
      .def_readwrite("eviction", &ManagerOptions::eviction)
      .def_readwrite("host_eviction", &ManagerOptions::host_eviction)
      .def_property(
          "writes_through", [](const ManagerOptions& self) { return self.host_writes.is_through; },
          [](ManagerOptions& self, bool value) { self.host_writes.is_through = value; })
      .def_property(
          "min_gain_to_write", [](const ManagerOptions& self) { return self.host_writes.min_gain; },
          [](ManagerOptions& self, std::optional<double> value) {
            self.host_writes.min_gain = value;
          })
      .def_readwrite("engine_copies_states", &ManagerOptions::engine_copies_states);
}

}  // namespace kvcache
