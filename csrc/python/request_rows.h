// SPDX-License-Identifier: Apache-2.0
// A KVCacheManager's requests, with each request's row and the chain that contains its hashes.
//
// A call changes the rows and the manager together, and runs no Python code between the first and
// the last change. Therefore, an exception from a signal handler is raised either before or after
// all of the changes. Names must be exact `str` objects, which are compared and hashed without
// running Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hashing/token_chain.h"
#include "core/manager/step_request.h"
#include "python/arrays.h"

namespace kvcache {

namespace py = pybind11;

class RequestRows {
 public:
  // `chain_key` contains the hash parameters of the manager's requests.
  RequestRows(py::tuple chain_key, int64_t max_encoder_tokens)
      : chain_key_(std::move(chain_key)), max_encoder_tokens_(max_encoder_tokens) {}

  // The key of requests that are passed from now on.
  const py::tuple& chain_key() const { return chain_key_; }
  void set_chain_key(py::tuple chain_key) { chain_key_ = std::move(chain_key); }

  // Registers Python's NamedTuples `Admit` (request, num_tokens, external, num_lookahead_tokens,
  // num_reserved_blocks, max_host_blocks, read_cache, num_prompt_tokens, num_shared_tokens) and
  // `External` (num_tokens, delayed), the type of `external` unless it is None.
  static void use_admit_types(const py::type& admit, const py::type& external) {
    admit_type() = admit.inc_ref().ptr();  // leaked, because the types must outlive the interpreter
    external_type() = external.inc_ref().ptr();
  }

  // The requests to admit, none of which has a row yet.
  struct Asking {
    std::vector<py::object> ids;
    std::vector<NewRow> rows;
  };

  // Reads requests and `Admit` values. Throws TypeError for anything else, and ValueError for a
  // request that is already admitted, is named twice, or has more encoder tokens than the manager
  // accepts.
  Asking asking(const py::handle& requests) const {
    const py::object sequence = sequence_of(requests, "new");
    const py::ssize_t n = PySequence_Fast_GET_SIZE(sequence.ptr());
    Asking out;
    out.ids.reserve(static_cast<size_t>(n));
    out.rows.reserve(static_cast<size_t>(n));
    for (py::ssize_t i = 0; i < n; ++i) {
      // Borrows each entry again, because reading a request runs Python code that may change the
      // list.
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
  // Returns the request of an `Admit`. Any other argument is returned unchanged.
  static py::object request_of(const py::object& asked) {
    if (!is_admit(asked)) return asked;
    return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(asked.ptr(), 0));
  }
  static bool is_admit(const py::handle& value) {
    return admit_type() != nullptr && PyObject_TypeCheck(value.ptr(), admit_class()) != 0;
  }
  // Checks again that no request has a row. Must be called after the last Python code in a call has
  // run, because that code may have admitted these requests.
  void check_new(const Asking& asking) const {
    for (const py::object& id : asking.ids) check_new(id);
  }

  // Records the rows of the new requests. A row of -1 means no row.
  void admit(const Asking& asking, const int32_t* rows) {
    for (size_t i = 0; i < asking.ids.size(); ++i) {
      if (rows[i] >= 0) rows_[asking.ids[i]] = py::int_(rows[i]);
    }
  }

  // The admitted requests among those given, each listed once.
  struct Leaving {
    std::vector<py::object> ids;
    std::vector<int32_t> rows;
  };

  // Returns the requests that have a row. Throws TypeError for values that are not requests.
  Leaving leaving(const py::tuple& requests) const {
    Leaving out;
    std::optional<py::set> seen;
    if (requests.size() > 1) seen.emplace();
    std::vector<py::object> ids;
    ids.reserve(requests.size());
    for (const py::handle& request : requests) {
      ids.push_back(id_of(request, [] { return std::string("request"); }));
    }
    // Looks up the rows after the last Python code in the call has run, because that code may have
    // freed or admitted requests.
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

  // Returns the request's row, or -1 if it has none.
  int32_t find(const py::object& request) const {
    PyObject* row = row_of(id_of(request, [] { return std::string("request"); }));
    return row == nullptr ? -1 : static_cast<int32_t>(PyLong_AsLong(row));
  }
  // Returns the request's row. Throws ValueError if the request has none.
  int32_t at(const py::object& request, const char* name) const {
    const py::object id = id_of(request, [name] { return std::string(name); });
    PyObject* row = row_of(id);
    if (row != nullptr) return static_cast<int32_t>(PyLong_AsLong(row));
    throw py::value_error("request " + repr(id) + " is not admitted: it has no blocks");
  }
  // Returns a dict that maps each request id to the value for its row.
  py::dict by_id(const std::vector<int32_t>& rows, const std::vector<int32_t>& values) const {
    py::dict out;
    if (rows.empty()) return out;  // the case for most reports
    std::unordered_map<int32_t, py::handle> names;
    for (const auto& [id, row] : rows_) names.emplace(py::cast<int32_t>(row), id);
    for (size_t i = 0; i < rows.size(); ++i) out[names.at(rows[i])] = py::int_(values[i]);
    return out;
  }

 private:
  static PyObject*& admit_type() {
    static PyObject* type = nullptr;
    return type;
  }
  static PyObject*& external_type() {
    static PyObject* type = nullptr;
    return type;
  }
  static PyTypeObject* admit_class() { return reinterpret_cast<PyTypeObject*>(admit_type()); }

  // Reads a request or an `Admit` value and appends it to `out`. `name()` returns the argument's
  // name for error messages.
  template <class Name>
  void add(const py::object& asked, const Name& name, Asking* out) const {
    const py::object request = request_of(asked);
    py::object id = id_of(request, name);
    NewRow row;
    row.chain = chain_of(request, name);
    if (is_admit(asked)) read_fields(asked, name, &row);
    check_new(id);
    check_encoder_tokens(*row.chain, id);
    row.name = utf8(id);
    out->rows.push_back(std::move(row));
    out->ids.push_back(std::move(id));
  }
  template <class Name>
  static void read_fields(const py::object& asked, const Name& name, NewRow* row) {
    const auto field = [&](py::ssize_t i) { return PyTuple_GET_ITEM(asked.ptr(), i); };
    const auto integer = [&](PyObject* value, const char* what) {
      return int_argument(py::handle(value), (name() + "." + what).c_str());
    };
    if (PyTuple_GET_SIZE(asked.ptr()) != 9) {
      throw py::type_error(name() + " has " + std::to_string(PyTuple_GET_SIZE(asked.ptr())) +
                           " fields: expected the 9 of Admit");
    }
    if (PyObject* external = field(2); external != Py_None) {
      if (Py_TYPE(external) != reinterpret_cast<PyTypeObject*>(external_type())) {
        throw py::type_error(name() + ".external is " + repr(external) +
                             ": expected an External or None");
      }
      row->external.num_tokens = integer(PyTuple_GET_ITEM(external, 0), "external.num_tokens");
      row->external.is_delayed = flag(PyTuple_GET_ITEM(external, 1), name() + ".external.delayed");
    }
    if (field(1) != Py_None) {
      row->num_tokens = integer(field(1), "num_tokens");
    } else if (row->external.is_delayed) {
      row->num_tokens = 0;
    }
    row->num_lookahead = integer(field(3), "num_lookahead_tokens");
    row->num_reserved_blocks = integer(field(4), "num_reserved_blocks");
    if (field(5) != Py_None) row->max_host_blocks = integer(field(5), "max_host_blocks");
    if (field(6) != Py_None) {
      row->read_cache = flag(field(6), name() + ".read_cache");
    }
    if (field(7) != Py_None) row->num_prompt = integer(field(7), "num_prompt_tokens");
    row->num_shared = integer(field(8), "num_shared_tokens");
  }
  // Reads a Python bool, like `flag_argument`, or a NumPy bool.
  static bool flag(PyObject* value, const std::string& name) {
    const char* type = Py_TYPE(value)->tp_name;
    if (std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0) {
      return PyObject_IsTrue(value) == 1;
    }
    return flag_argument(value, name.c_str());
  }
  void check_new(const py::object& id) const {
    if (row_of(id) == nullptr) return;
    throw py::value_error("request " + repr(id) + " is already admitted");
  }
  // Returns the id as an exact string. `name()` returns the argument's name for error messages.
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

  // Returns a view of the string's text, which the string owns. Empty if the text is not valid
  // Unicode.
  static std::string_view utf8(const py::object& id) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
    if (text != nullptr) return {text, static_cast<size_t>(size)};
    PyErr_Clear();
    return {};
  }

  static std::string repr(const py::handle& value) { return short_repr(value); }
  // Returns an interned string, which is leaked, because it must outlive the interpreter.
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

  // Returns a list or tuple unchanged, and any other iterable as a list.
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

  // Returns an iterator's values as a list. Throws ValueError if there are too many, because the
  // iterator may be infinite.
  static py::object listed(const py::object& iterator, const char* name) {
    constexpr size_t kMost = 1 << 20;
    py::list out;
    while (const auto entry = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()))) {
      if (out.size() == kMost) {
        throw py::value_error(std::string(name) + " has more than " + std::to_string(kMost) +
                              " entries and no length: expected a list");
      }
      out.append(entry);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return out;
  }

  static py::object item(const py::object& sequence, py::ssize_t i, py::ssize_t n) {
    if (PySequence_Fast_GET_SIZE(sequence.ptr()) != n) {
      throw py::value_error(
          "new was changed while it was read: expected a list that stays unchanged");
    }
    return py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence.ptr(), i));
  }

  [[noreturn]] static void fail_no_request(const py::handle& request, const std::string& name) {
    throw py::type_error(name + " is " + repr(request) + ": expected a Request");
  }

  // Returns an attribute of a request. Throws TypeError if the argument is not a request. `name()`
  // returns the argument's name for error messages.
  template <class Name>
  static py::object attribute(const py::handle& request, const py::str& attribute,
                              const Name& name) {
    auto out = py::reinterpret_steal<py::object>(PyObject_GetAttr(request.ptr(), attribute.ptr()));
    if (out) return out;
    const py::error_already_set error;  // fetches the current error
    if (!error.matches(PyExc_AttributeError)) throw error;
    fail_no_request(request, name());
  }

  // Returns the request's chain of hashes for this manager. `name()` returns the argument's name
  // for error messages.
  template <class Name>
  std::shared_ptr<TokenChain> chain_of(const py::handle& request, const Name& name) const {
    // Looks for the most recently used chain, without calling Python.
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
    const py::error_already_set error;  // fetches the current error
    if (PyObject_HasAttr(request.ptr(), chain_name().ptr())) throw error;
    fail_no_request(request, name());
  }

  // Returns a borrowed reference, or null if the request has no row.
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

  py::dict rows_;  // rows by request id
  py::tuple chain_key_;
  int64_t max_encoder_tokens_;
};

}  // namespace kvcache
