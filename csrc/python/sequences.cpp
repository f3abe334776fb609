// SPDX-License-Identifier: Apache-2.0
// Provides the functions of `SequenceCalls` as methods of the Python class `BlockSpaceManager`.
//
// The methods use CPython's calling convention, because pybind11's dispatch would take longer than
// the calls themselves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "python/construct.h"
#include "python/fast_method.h"
#include "python/sequence_calls.h"

namespace kvcache::sequences {
namespace {

// A call's name, its arguments, and the default value of its last argument.
struct Spec {
  const char* name;
  PyObject* (SequenceCalls::*method)(py::handle, py::handle) const;
  std::array<const char*, 2> arguments;
  int num_arguments, num_required;
};
constexpr Spec kCalls[] = {
    {"can_allocate", &SequenceCalls::can_allocate, {"seq_group", "num_lookahead_slots"}, 2, 1},
    {"can_append_slots",
     &SequenceCalls::can_append_slots,
     {"seq_group", "num_lookahead_slots"},
     2,
     2},
    {"append_slots", &SequenceCalls::append_slots, {"seq", "num_lookahead_slots"}, 2, 2},
    {"append_group_slots",
     &SequenceCalls::append_group_slots,
     {"seq_groups", "num_lookahead_slots"},
     2,
     2},
    {"get_block_table", &SequenceCalls::get_block_table, {"seq", ""}, 1, 1},
    {"access_all_blocks_in_seq", &SequenceCalls::access_all_blocks_in_seq, {"seq", "now"}, 2, 2},
    {"mark_blocks_as_computed",
     &SequenceCalls::mark_blocks_as_computed,
     {"seq_group", "token_chunk_size"},
     2,
     2},
    {"get_common_computed_block_ids",
     &SequenceCalls::get_common_computed_block_ids,
     {"seqs", ""},
     1,
     1},
};
constexpr size_t kNumCalls = std::size(kCalls);

// Binds the arguments to positions, as Python does.
std::array<PyObject*, 2> bound(const Spec& spec, PyObject* const* args, Py_ssize_t num_positional,
                               PyObject* keywords) {
  const auto fail = [&](const std::string& what) {
    throw py::type_error(std::string(spec.name) + "() " + what);
  };
  std::array<PyObject*, 2> out{};
  if (num_positional > spec.num_arguments) {
    fail("takes " + std::to_string(spec.num_arguments) + " arguments, but " +
         std::to_string(num_positional) + " were given");
  }
  std::copy(args, args + num_positional, out.begin());
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
    int found = 0;
    while (found < spec.num_arguments &&
           PyUnicode_CompareWithASCIIString(keyword, spec.arguments[found]) != 0) {
      ++found;
    }
    if (found == spec.num_arguments) fail("has no argument " + repr_of(keyword));
    if (out[found] != nullptr) fail("got argument " + repr_of(keyword) + " twice");
    out[found] = args[num_positional + i];
  }
  for (int i = 0; i < spec.num_required; ++i) {
    if (out[i] == nullptr) fail("lacks argument '" + std::string(spec.arguments[i]) + "'");
  }
  return out;
}

template <size_t kCall>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t num_positional,
               PyObject* keywords) noexcept {
  constexpr const Spec& spec = kCalls[kCall];
  try {
    const SequenceCalls& calls = self_of<SequenceCalls>(self);
    if (keywords == nullptr && num_positional == spec.num_arguments) {
      return (calls.*spec.method)(args[0], args[spec.num_arguments - 1]);
    }
    std::array<PyObject*, 2> values = bound(spec, args, num_positional, keywords);
    const py::int_ zero(0);
    if (values[1] == nullptr) values[1] = zero.ptr();
    return (calls.*spec.method)(values[0], values[1]);
  } catch (...) {
    raise_current();
    return nullptr;
  }
}

template <size_t... kCall>
std::array<_PyCFunctionFastWithKeywords, kNumCalls> functions(std::index_sequence<kCall...>) {
  return {&call<kCall>...};
}

// Python decorator: returns the native method with the declared name, and gives it the
// declaration's signature and docstring.
py::object native_method(const py::object& declaration) {
  const auto name = py::cast<std::string>(declaration.attr("__name__"));
  const auto spec = std::find_if(std::begin(kCalls), std::end(kCalls),
                                 [&](const Spec& each) { return name == each.name; });
  if (spec == std::end(kCalls)) throw py::value_error("no native method is called " + name);
  std::string text = name + "($self";
  for (int i = 0; i < spec->num_arguments; ++i) {
    text += std::string(", ") + spec->arguments[i] + (i < spec->num_required ? "" : "=0");
  }
  text += ")\n--\n\n" + py::cast<std::string>(declaration.attr("__doc__"));
  const auto function =
      functions(std::make_index_sequence<kNumCalls>())[static_cast<size_t>(spec - kCalls)];
  // The text is leaked, because it must live as long as the method.
  return new_method(py::type::of<SequenceCalls>(), spec->name, function,
                    METH_FASTCALL | METH_KEYWORDS, (new std::string(text))->c_str());
}

}  // namespace
}  // namespace kvcache::sequences

namespace kvcache {

void bind_sequences(py::module_& m) {
  using namespace sequences;
  py::class_<AllocatedSequence>(m, "AllocatedSequence")
      .def_readonly("row", &AllocatedSequence::row)
      .def_readonly("tokens", &AllocatedSequence::tokens)
      .def_readonly("num_tokens", &AllocatedSequence::num_tokens)
      .def_readonly("num_prompt", &AllocatedSequence::num_prompt)
      .def_readonly("num_cached", &AllocatedSequence::num_cached)
      .def_readonly("num_marked", &AllocatedSequence::num_marked)
      .def_readonly("num_with_kv", &AllocatedSequence::num_with_kv)
      .def_property_readonly("table",
                             [](const AllocatedSequence& self) -> py::object {
                               return self.table ? self.table : py::object(py::none());
                             })
      .def_property_readonly("hits", [](const AllocatedSequence& self) -> py::object {
        return self.hits ? self.hits : py::object(py::none());
      });
  def_init(
      py::class_<SequenceCalls>(m, "SequenceCalls"),
      [](const py::object& native, int64_t block_size, std::optional<int64_t> window,
         bool enable_caching, int64_t watermark_blocks, int64_t max_model_len,
         const py::tuple& statuses) {
        return std::make_unique<SequenceCalls>(native, block_size, window, enable_caching,
                                               watermark_blocks, max_model_len, statuses);
      },
      py::kw_only(), py::arg("native"), py::arg("block_size"), py::arg("sliding_window"),
      py::arg("enable_caching"), py::arg("watermark_blocks"), py::arg("max_model_len"),
      py::arg("statuses"))
      .def("_take_rows", &SequenceCalls::take_rows, py::arg("sequences"), py::arg("hits"),
           py::arg("num_cached"), py::arg("skips_blocks"), py::arg("encoder"), py::arg("since"))
      .def("_fork_row", &SequenceCalls::fork_row, py::arg("parent"), py::arg("seq_id"),
           py::arg("tokens"), py::arg("since"))
      .def("_free_row", &SequenceCalls::free_row, py::arg("seq_id"))
      .def("_free_encoder_row", &SequenceCalls::free_encoder_row, py::arg("rows"),
           py::arg("request_id"))
      .def("_swap_out_rows", &SequenceCalls::swap_out_rows, py::arg("rows"), py::arg("sequences"),
           py::arg("since"))
      .def("_swap_in_rows", &SequenceCalls::swap_in_rows, py::arg("rows"), py::arg("since"))
      .def_property_readonly("_num_changes", &SequenceCalls::num_changes)
      .def_property_readonly("_allocated", &SequenceCalls::allocated)
      .def_property_readonly("block_size", &SequenceCalls::block_size)
      .def_property_readonly("sliding_window", &SequenceCalls::sliding_window)
      .def_property_readonly("enable_caching", &SequenceCalls::enable_caching)
      .def_property_readonly("max_model_len", &SequenceCalls::max_model_len)
      .def_property("watermark_blocks", &SequenceCalls::watermark_blocks,
                    [](SequenceCalls& self, const py::object& value) {
                      constexpr const char* name = "watermark_blocks";
                      self.set_watermark_blocks(int_argument(value, name, 0, kMaxInt32));
                    })
      .def("_known", &SequenceCalls::known)
      .def("_num_new",
           [](const SequenceCalls& self, const py::object& seq) { return self.num_new(seq); })
      .def("_num_required", &SequenceCalls::num_required);
  m.def("seq_id_of", [](const py::object& seq) { return seq_id_of(seq); });
  m.def("request_id_of", [](const py::object& group) { return request_id_of(group); });
  m.def("has_encoder", [](const py::object& group) { return has_encoder(group); });
  m.def("native_method", &native_method);
  m.def("length_of", [](const py::object& seq) { return length_of(seq); });
  m.def("encoder_length", [](const py::object& group, int64_t max_model_len) {
    return encoder_length(group, max_model_len);
  });
  m.def("sequences_with", [](const py::object& group, const py::str& status) {
    return sequences_with(group, status);
  });
  m.def(
      "check_tier",
      [](const Manager& native, int32_t row, const std::string& what, const py::object& name,
         bool on_host) { check_tier(native, row, what.c_str(), name, on_host); },
      py::arg("native"), py::arg("row"), py::arg("what"), py::arg("name"), py::arg("on_host"));
}

}  // namespace kvcache
