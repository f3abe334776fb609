// The requests of a KVCacheManager: which row each has, and the chain that its hashes are in.
//
// A call changes the rows and the manager together, and runs no Python code from the first change
// to the last: an exception from a signal handler comes before both or after both. So names are
// exact strings, which compare and hash without Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hashing/token_chain.h"
#include "python/arrays.h"

namespace kvcache {

namespace py = pybind11;

class RequestRows {
 public:
  // `chain_key`: what the manager's requests are hashed for.
  RequestRows(py::tuple chain_key, int64_t max_encoder_tokens)
      : chain_key_(std::move(chain_key)), max_encoder_tokens_(max_encoder_tokens) {}

  // Requests that ask for a row: none of them has one.
  struct Asking {
    std::vector<py::object> ids;
    std::vector<std::shared_ptr<TokenChain>> chains;
  };

  // TypeError for what are no requests; ValueError for one that is admitted already, that is named
  // twice, or that has more encoder tokens than the manager takes.
  Asking asking(const py::handle& requests) const {
    const py::object sequence = sequence_of(requests, "new");
    const py::ssize_t n = PySequence_Fast_GET_SIZE(sequence.ptr());
    Asking out;
    out.ids.reserve(static_cast<size_t>(n));
    out.chains.reserve(static_cast<size_t>(n));
    for (py::ssize_t i = 0; i < n; ++i) {
      // Borrowed anew each time: what is asked of a request is Python, and may change a list.
      add(item(sequence, i, n), [i] { return "new[" + std::to_string(i) + "]"; }, &out);
    }
    if (n > 1) check_once(out.ids);
    return out;
  }
  Asking asking_alone(const py::object& request, const char* name) const {
    Asking out;
    add(request, [name] { return std::string(name); }, &out);
    return out;
  }
  // Again, behind the last Python code of a call: that may have admitted them.
  void check_new(const Asking& asking) const {
    for (const py::object& id : asking.ids) check_new(id);
  }

  // The rows that those who asked have got; -1: none.
  void admit(const Asking& asking, const int32_t* rows) {
    for (size_t i = 0; i < asking.ids.size(); ++i) {
      if (rows[i] >= 0) rows_[asking.ids[i]] = py::int_(rows[i]);
    }
  }

  // Admitted requests of these, each once.
  struct Leaving {
    std::vector<py::object> ids;
    std::vector<int32_t> rows;
  };

  // TypeError for what are no requests; those that have no row are left out.
  Leaving leaving(const py::tuple& requests) const {
    Leaving out;
    std::optional<py::set> seen;
    if (requests.size() > 1) seen.emplace();
    std::vector<py::object> ids;
    ids.reserve(requests.size());
    for (const py::handle& request : requests) {
      ids.push_back(id_of(request, [] { return std::string("request"); }));
    }
    // Behind the last Python code, which may have freed and admitted requests.
    for (py::object& id : ids) {
      PyObject* row = row_of(id);
      if (row == nullptr || (seen && !is_first(*seen, id))) continue;
      out.rows.push_back(static_cast<int32_t>(PyLong_AsLong(row)));
      out.ids.push_back(std::move(id));
    }
    return out;
  }
  void forget(const Leaving& leaving) {
    for (const py::object& id : leaving.ids) {
      if (PyDict_DelItem(rows_.ptr(), id.ptr()) != 0) throw py::error_already_set();
    }
  }

  // -1 where it has none.
  int32_t find(const py::object& request) const {
    PyObject* row = row_of(id_of(request, [] { return std::string("request"); }));
    return row == nullptr ? -1 : static_cast<int32_t>(PyLong_AsLong(row));
  }
  // ValueError where it has none.
  int32_t at(const py::object& request, const char* name) const {
    const py::object id = id_of(request, [name] { return std::string(name); });
    PyObject* row = row_of(id);
    if (row != nullptr) return static_cast<int32_t>(PyLong_AsLong(row));
    throw py::value_error("request " + repr(id) + " is not admitted: it has no blocks");
  }
  // What is said of rows, by the ids of their requests.
  py::dict by_id(const std::vector<int32_t>& rows, const std::vector<int32_t>& values) const {
    py::dict out;
    if (rows.empty()) return out;  // most reports
    std::unordered_map<int32_t, py::handle> names;
    for (const auto& [id, row] : rows_) names.emplace(py::cast<int32_t>(row), id);
    for (size_t i = 0; i < rows.size(); ++i) out[names.at(rows[i])] = py::int_(values[i]);
    return out;
  }

 private:
  template <class Name>
  void add(const py::object& request, const Name& name, Asking* out) const {
    py::object id = id_of(request, name);
    out->chains.push_back(chain_of(request, name));
    check_new(id);
    check_encoder_tokens(*out->chains.back(), id);
    out->ids.push_back(std::move(id));
  }
  void check_new(const py::object& id) const {
    if (row_of(id) == nullptr) return;
    throw py::value_error("request " + repr(id) + " is admitted already");
  }
  // As an exact string. `name()` says which argument the request is.
  template <class Name>
  static py::object id_of(const py::handle& request, const Name& name) {
    py::object id = attribute(request, id_name(), name);
    if (PyUnicode_CheckExact(id.ptr())) return id;
    if (!PyUnicode_Check(id.ptr())) {
      throw py::type_error("request_id is " + repr(id) + ": expected a string");
    }
    auto exact = py::reinterpret_steal<py::object>(PyUnicode_FromObject(id.ptr()));
    if (!exact) throw py::error_already_set();
    return exact;
  }

  static std::string repr(const py::handle& value) { return short_repr(value); }
  // Leaked: it must outlive the interpreter.
  static const py::str& interned(const char* text) {
    return *new py::str(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text)));
  }
  static const py::str& id_name() {
    static const py::str& name = interned("request_id");
    return name;
  }
  static const py::str& chain_name() {
    static const py::str& name = interned("chain");
    return name;
  }

  static const py::str& last_name() {
    static const py::str& name = interned("_last");
    return name;
  }

  // A list or tuple as it is, any other iterable as a list.
  static py::object sequence_of(const py::handle& values, const char* name) {
    check_num_entries(values, name);
    if (PySequence_Check(values.ptr()) || PyObject_HasAttrString(values.ptr(), "__len__")) {
      auto out = py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), ""));
      if (out) return out;
    } else if (const auto iterator =
                   py::reinterpret_steal<py::object>(PyObject_GetIter(values.ptr()))) {
      return listed(iterator, name);
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    throw py::type_error(std::string(name) + " is " + repr(values) +
                         ": expected a sequence of requests");
  }

  // What an iterator gives, which may be without an end.
  static py::object listed(const py::object& iterator, const char* name) {
    constexpr size_t kMost = 1 << 20;
    py::list out;
    while (const auto entry = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()))) {
      if (out.size() == kMost) {
        throw py::value_error(std::string(name) + " has more than " + std::to_string(kMost) +
                              " entries and does not say how many: expected a list");
      }
      out.append(entry);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return out;
  }

  static py::object item(const py::object& sequence, py::ssize_t i, py::ssize_t n) {
    if (PySequence_Fast_GET_SIZE(sequence.ptr()) != n) {
      throw py::value_error("new was changed while it was read: expected it to stay as it is");
    }
    return py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence.ptr(), i));
  }

  [[noreturn]] static void fail_no_request(const py::handle& request, const std::string& name) {
    throw py::type_error(name + " is " + repr(request) + ": expected a Request");
  }

  // `name()` says which argument the request is.
  template <class Name>
  static py::object attribute(const py::handle& request, const py::str& attribute,
                              const Name& name) {
    auto out = py::reinterpret_steal<py::object>(PyObject_GetAttr(request.ptr(), attribute.ptr()));
    if (out) return out;
    const py::error_already_set error;  // takes it
    if (!error.matches(PyExc_AttributeError)) throw error;
    fail_no_request(request, name());
  }

  // `name()` says which argument the request is.
  template <class Name>
  std::shared_ptr<TokenChain> chain_of(const py::handle& request, const Name& name) const {
    // The chain that was asked for last, without calling Python.
    const auto last =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(request.ptr(), last_name().ptr()));
    if (!last) {
      clear_refusal();
    } else if (PyTuple_Check(last.ptr()) && PyTuple_GET_SIZE(last.ptr()) == 2 &&
               PyTuple_GET_ITEM(last.ptr(), 0) == chain_key_.ptr()) {
      return py::cast<std::shared_ptr<TokenChain>>(PyTuple_GET_ITEM(last.ptr(), 1));
    }
    PyObject* arguments[] = {request.ptr(), chain_key_.ptr()};
    const auto chain = py::reinterpret_steal<py::object>(
        PyObject_VectorcallMethod(chain_name().ptr(), arguments, 2, nullptr));
    if (chain) return py::cast<std::shared_ptr<TokenChain>>(chain);
    const py::error_already_set error;  // takes it
    if (PyObject_HasAttr(request.ptr(), chain_name().ptr())) throw error;
    fail_no_request(request, name());
  }

  // Borrowed; null where it has none.
  PyObject* row_of(const py::object& id) const {
    PyObject* row = PyDict_GetItemWithError(rows_.ptr(), id.ptr());
    if (row == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return row;
  }

  void check_encoder_tokens(const TokenChain& chain, const py::object& id) const {
    if (chain.num_encoder_tokens() <= max_encoder_tokens_) return;
    throw py::value_error("num_encoder_tokens of request " + repr(id) + " is " +
                          std::to_string(chain.num_encoder_tokens()) +
                          ": expected at most max_encoder_tokens, which is " +
                          std::to_string(max_encoder_tokens_));
  }

  static void check_once(const std::vector<py::object>& ids) {
    const py::set seen;
    for (const py::object& id : ids) {
      if (!is_first(seen, id)) throw py::value_error("new names request " + repr(id) + " twice");
    }
  }

  static bool is_first(const py::set& seen, const py::object& id) {
    const py::ssize_t before = PySet_GET_SIZE(seen.ptr());
    if (PySet_Add(seen.ptr(), id.ptr()) != 0) throw py::error_already_set();
    return PySet_GET_SIZE(seen.ptr()) > before;
  }

  py::dict rows_;  // by id
  py::tuple chain_key_;
  int64_t max_encoder_tokens_;
};

}  // namespace kvcache
