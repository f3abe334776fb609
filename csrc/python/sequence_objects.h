// SPDX-License-Identifier: Apache-2.0
// Reads the engine's sequence and group objects for `BlockSpaceManager`, using CPython's C API.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/manager/manager.h"
#include "python/arrays.h"

namespace kvcache::sequences {

// While this object exists, no allocation starts a garbage collection. Otherwise, finalizers might
// call the manager in the middle of a change.
class NoCollection {
 public:
  NoCollection() : was_enabled_(PyGC_Disable() != 0) {}
  ~NoCollection() {
    if (was_enabled_) PyGC_Enable();
  }
  NoCollection(const NoCollection&) = delete;

 private:
  bool was_enabled_;
};

// The names of the attributes of sequences and groups.
struct Names {
  static const Names& get() {
    static const auto* names = new Names;  // leaked, because it must outlive the interpreter
    return *names;
  }
  py::str seq_id = interned("seq_id"), status = interned("status"), name = interned("name");
  py::str get_len = interned("get_len"), get_token_ids = interned("get_token_ids");
  py::str get_seqs = interned("get_seqs"), request_id = interned("request_id");
  py::str is_encoder_decoder = interned("is_encoder_decoder");
  py::str get_encoder_seq = interned("get_encoder_seq");
  py::str waiting = interned("WAITING"), running = interned("RUNNING");
  py::str swapped = interned("SWAPPED");

 private:
  static py::str interned(const char* text) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
  }
};

// Raises TypeError if the sequence or group does not have this attribute. Other errors, from the
// attribute's own code, propagate.
[[noreturn]] inline void fail_attribute(py::handle of, const py::str& name) {
  py::error_already_set cause;
  if (!cause.matches(PyExc_AttributeError) || PyObject_HasAttr(of.ptr(), name.ptr()) != 0) {
    throw cause;
  }
  const Names& names = Names::get();
  const bool is_group = name.is(names.get_seqs) || name.is(names.request_id) ||
                        name.is(names.is_encoder_decoder) || name.is(names.get_encoder_seq);
  throw py::type_error((is_group ? "seq_group is " : "seq is ") + short_repr(of) +
                       ": expected an object with " + py::cast<std::string>(name));
}

inline py::object attribute(py::handle of, const py::str& name) {
  PyObject* value = PyObject_GetAttr(of.ptr(), name.ptr());
  if (value == nullptr) fail_attribute(of, name);
  return py::reinterpret_steal<py::object>(value);
}

inline py::object call_method(py::handle of, const py::str& name) {
  PyObject* const self = of.ptr();
  PyObject* value =
      PyObject_VectorcallMethod(name.ptr(), &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (value == nullptr) fail_attribute(of, name);
  return py::reinterpret_steal<py::object>(value);
}

// Checks a dictionary key, which must be hashable.
inline py::object name_of(py::handle of, const py::str& attribute_name) {
  py::object value = attribute(of, attribute_name);
  if (PyLong_CheckExact(value.ptr()) || PyUnicode_CheckExact(value.ptr())) return value;
  if (PyObject_Hash(value.ptr()) != -1) return value;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();
  throw py::type_error(py::cast<std::string>(attribute_name) + " is " + short_repr(value) +
                       ": expected a hashable value");
}
inline py::object seq_id_of(py::handle seq) { return name_of(seq, Names::get().seq_id); }
inline py::object request_id_of(py::handle group) {
  return name_of(group, Names::get().request_id);
}

// `name` returns the argument's name and is called only if there is an error.
template <class Name>
int64_t whole_number(py::handle value, Name name, int64_t least, int64_t most) {
  int64_t number = 0;
  int overflow = 0;
  if (PyLong_CheckExact(value.ptr())) {
    number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  } else if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    throw py::type_error(name() + " is " + repr_of(value) + ": expected an integer");
  } else {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
      PyErr_Clear();
      throw py::type_error(name() + " is " + short_repr(value) + ": expected an integer");
    }
    number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  }
  if (overflow == 0 && number >= least && number <= most) return number;
  const auto given = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!given) throw py::error_already_set();
  throw py::value_error(name() + " is " + repr_of(given) + ": expected " + std::to_string(least) +
                        " to " + std::to_string(most));
}

inline int64_t size_argument(py::handle value, const char* name) {
  return whole_number(value, [=] { return std::string(name); }, 0, kMaxInt32);
}

inline int64_t length_of(py::handle seq) {
  const py::object length = call_method(seq, Names::get().get_len);
  return whole_number(
      length, [&] { return "get_len() of seq " + repr_of(seq_id_of(seq)); }, 1, kMaxInt32);
}

inline bool has_encoder(py::handle group) {
  const py::object value = call_method(group, Names::get().is_encoder_decoder);
  if (value.ptr() == Py_True || value.ptr() == Py_False) return value.ptr() == Py_True;
  const int answer = PyObject_IsTrue(value.ptr());
  if (answer >= 0) return answer != 0;
  clear_refusal();
  throw py::type_error("is_encoder_decoder() is " + short_repr(value) + ": expected True or False");
}

[[noreturn]] inline void fail_ids(py::handle seq, int64_t num_ids, int64_t num_tokens) {
  throw py::value_error("get_token_ids() of seq " + repr_of(seq_id_of(seq)) + " has " +
                        std::to_string(num_ids) + " tokens: expected " +
                        std::to_string(num_tokens) + ", the value of get_len()");
}

[[noreturn]] inline void fail_unknown(py::handle seq) {
  throw py::value_error("seq " + repr_of(seq_id_of(seq)) +
                        " has no blocks: expected one that was allocated");
}

inline void check_tier(const Manager& native, int32_t row, const char* what, py::handle name,
                       bool on_host) {
  if (native.is_on_host(row) == on_host) return;
  throw py::value_error(std::string(what) + " " + repr_of(name) +
                        (on_host ? " is on the device: expected one that is swapped out"
                                 : " is swapped out: expected one on the device"));
}

enum class Status { kWaiting, kRunning, kSwapped, kFinished, kOther };

inline Status status_named(PyObject* name) {
  const Names& names = Names::get();
  const std::pair<PyObject*, Status> known[] = {{names.running.ptr(), Status::kRunning},
                                                {names.waiting.ptr(), Status::kWaiting},
                                                {names.swapped.ptr(), Status::kSwapped}};
  for (const auto& [text, status] : known) {  // string literals in Python code are usually interned
    if (name == text) return status;
  }
  for (const auto& [text, status] : known) {
    if (PyUnicode_Compare(name, text) == 0) return status;
  }
  const auto text = py::reinterpret_borrow<py::object>(name);
  return py::cast<bool>(text.attr("startswith")("FINISHED")) ? Status::kFinished : Status::kOther;
}

// Returns the status of a sequence, whose Python attribute is an enum member or a string. Because
// the names of enum members do not change, known members are cached.
inline Status status_of(py::handle seq) {
  // Maximum number of cached enum members. An engine has a single status enum, which normally has
  // fewer members.
  constexpr size_t kMostKnown = 32;
  static auto* known = new std::vector<std::pair<PyObject*, Status>>;
  const Names& names = Names::get();
  const py::object status = attribute(seq, names.status);
  for (const auto& [member, value] : *known) {
    if (member == status.ptr()) return value;
  }
  if (PyUnicode_CheckExact(status.ptr())) return status_named(status.ptr());
  auto name = py::reinterpret_steal<py::object>(PyObject_GetAttr(status.ptr(), names.name.ptr()));
  if (!name) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
    name = status;
  }
  if (!PyUnicode_Check(name.ptr())) {
    throw py::type_error("status of seq " + repr_of(seq_id_of(seq)) + " is " + repr_of(status) +
                         ": expected an enum member or text");
  }
  const Status value = status_named(name.ptr());
  static auto* enum_type = new py::object(py::module_::import("enum").attr("Enum"));
  if (known->size() < kMostKnown && py::isinstance(status, *enum_type)) {
    known->emplace_back(status.inc_ref().ptr(), value);
  }
  return value;
}

// Iterates over a group's sequences. Python code may run between two sequences.
class Sequences {
 public:
  Sequences(py::object seqs, const char* name) : seqs_(listed(std::move(seqs), name)) {}
  static Sequences of(py::handle group) {
    return Sequences(call_method(group, Names::get().get_seqs), "get_seqs() of seq_group");
  }
  // Returns the next sequence, or null at the end.
  py::object next() {
    if (at_ >= PySequence_Fast_GET_SIZE(seqs_.ptr())) return {};
    return py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(seqs_.ptr(), at_++));
  }

 private:
  // Returns lists and tuples unchanged, and converts other iterables, which must have a length, to
  // lists.
  static py::object listed(py::object seqs, const char* name) {
    if (PyList_CheckExact(seqs.ptr()) || PyTuple_CheckExact(seqs.ptr())) return seqs;
    check_num_entries(seqs, name);
    if (PyObject_Size(seqs.ptr()) < 0 || !py::isinstance<py::iterable>(seqs)) {
      clear_refusal();
      throw py::type_error(std::string(name) + " is " + short_repr(seqs) + ": expected a list");
    }
    return py::list(seqs);
  }

  py::object seqs_;
  py::ssize_t at_ = 0;
};

[[noreturn]] inline void fail_none(py::handle group, const char* status) {
  throw py::value_error("seq_group " + repr_of(attribute(group, Names::get().request_id)) +
                        " has no " + status + " sequence: expected 1 or more");
}

// Returns the group's sequences with this status. There must be at least one.
inline py::list sequences_with(py::handle group, const py::str& status) {
  const Status wanted = status_named(status.ptr());
  Sequences seqs = Sequences::of(group);
  py::list out;
  while (const py::object seq = seqs.next()) {
    if (status_of(seq) == wanted) out.append(seq);
  }
  if (out.empty()) fail_none(group, py::cast<std::string>(status).c_str());
  return out;
}

inline int64_t encoder_length(py::handle group, int64_t max_model_len) {
  const py::object encoder = call_method(group, Names::get().get_encoder_seq);
  const py::object length = call_method(encoder, Names::get().get_len);
  const int64_t count =
      whole_number(length, [] { return std::string("get_encoder_seq().get_len()"); }, 0, kMaxInt32);
  if (count > 0 && count <= max_model_len) return count;
  throw py::value_error("the encoder of seq_group " +
                        repr_of(attribute(group, Names::get().request_id)) + " has " +
                        std::to_string(count) + " tokens: expected 1 to max_model_len, which is " +
                        std::to_string(max_model_len));
}

}  // namespace kvcache::sequences
