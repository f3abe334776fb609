// SPDX-License-Identifier: Apache-2.0
// Conversions of integer arrays between Python and native code.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace kvcache {

namespace py = pybind11;

using Int32Array = py::array_t<int32_t, py::array::c_style>;

// Creates an array with numpy's constructor. A step creates several arrays, and pybind11's general
// constructor is three times as slow.
template <class T>
py::array_t<T, py::array::c_style> new_array(py::ssize_t n) {
  static const py::dtype dtype = py::dtype::of<T>();
  const auto& api = py::detail::npy_api::get();
  Py_intptr_t size = n;
  dtype.inc_ref();  // the constructor steals a reference
  PyObject* array = api.PyArray_NewFromDescr_(api.PyArray_Type_, dtype.ptr(), 1, &size, nullptr,
                                              nullptr, 0, nullptr);
  if (array == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::array_t<T, py::array::c_style>>(array);
}

// Returns a writable array over memory that `owner` keeps alive.
template <class T>
py::object view_of(T* data, std::initializer_list<py::ssize_t> shape, const py::object& owner) {
  static const py::dtype dtype = py::dtype::of<T>();
  const auto& api = py::detail::npy_api::get();
  dtype.inc_ref();  // the constructor steals a reference
  PyObject* array =
      api.PyArray_NewFromDescr_(api.PyArray_Type_, dtype.ptr(), static_cast<int>(shape.size()),
                                reinterpret_cast<const Py_intptr_t*>(shape.begin()), nullptr, data,
                                py::detail::npy_api::NPY_ARRAY_WRITEABLE_, nullptr);
  if (array == nullptr) throw py::error_already_set();
  auto out = py::reinterpret_steal<py::object>(array);
  owner.inc_ref();  // the array steals a reference
  if (api.PyArray_SetBaseObject_(array, owner.ptr()) != 0) throw py::error_already_set();
  return out;
}

template <class T>
py::array_t<T, py::array::c_style> copy_array(const T* values, int64_t n) {
  auto out = new_array<T>(static_cast<py::ssize_t>(n));
  std::copy(values, values + n, static_cast<T*>(out.mutable_data()));
  return out;
}
template <class T>
py::array_t<T, py::array::c_style> copy_array(const std::vector<T>& values) {
  return copy_array(values.data(), static_cast<int64_t>(values.size()));
}

inline Int32Array new_int32(py::ssize_t n) { return new_array<int32_t>(n); }
inline Int32Array copy_int32(const std::vector<int32_t>& values) { return copy_array(values); }

inline constexpr int64_t kMinInt32 = std::numeric_limits<int32_t>::min();
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Clears an error that Python raised because a value has the wrong type. MemoryError and errors
// raised by signal handlers propagate.
inline void clear_refusal() {
  if (PyErr_Occurred() &&
      (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))) {
    throw py::error_already_set();
  }
  PyErr_Clear();
}

// Formats a value for an error message, like `kvcache.checks.shown`. Integers with more digits than
// Python prints, and values without a repr, are replaced by a description.
inline std::string repr_of(const py::handle& value) {
  try {
    return py::cast<std::string>(py::repr(value));
  } catch (py::error_already_set& error) {
    error.restore();
    clear_refusal();
  }
  if (!PyLong_Check(value.ptr())) {
    return std::string("a ") + Py_TYPE(value.ptr())->tp_name;
  }
  const auto num_bits = py::reinterpret_borrow<py::object>(value).attr("bit_length")();
  return "an integer of " + py::cast<std::string>(py::str(num_bits)) + " bits";
}

// Like repr_of, but truncates long text.
inline std::string short_repr(const py::handle& value) {
  constexpr size_t kMost = 100;
  const std::string text = repr_of(value);
  if (text.size() <= kMost) return text;
  size_t end = kMost;
  // Moves the end back to the start of a UTF-8 character.
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

// Converts a Python int or an object with __index__, but not True or False. Raises TypeError for
// anything else, and ValueError for values beyond int64, which exceed every bound that C++ checks.
inline int64_t int_argument(const py::handle& value, const char* name) {
  const auto number = PyBool_Check(value.ptr())
                          ? py::object()
                          : py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) {
      throw py::error_already_set();
    }
    PyErr_Clear();
    throw py::type_error(std::string(name) + " is " + short_repr(value) + ": expected an integer");
  }
  int overflow = 0;
  const int64_t out = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0) return out;
  throw py::value_error(
      std::string(name) + " is " + repr_of(number) +
      (overflow > 0 ? ": expected at most " + std::to_string(kMaxInt32) : ": expected 0 or more"));
}

// Converts a Python float or an object with __float__ or __index__, but not True or False.
inline double number_argument(const py::handle& value, const char* name) {
  if (PyFloat_CheckExact(value.ptr())) return PyFloat_AS_DOUBLE(value.ptr());
  const double out = PyBool_Check(value.ptr()) ? -1 : PyFloat_AsDouble(value.ptr());
  if (!PyErr_Occurred() && !PyBool_Check(value.ptr())) return out;
  const bool is_too_large = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError);
  if (PyErr_Occurred() && !is_too_large && !PyErr_ExceptionMatches(PyExc_TypeError) &&
      !PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  const std::string text = std::string(name) + " is " + short_repr(value) + ": expected a number";
  if (is_too_large) throw py::value_error(text + " that a float can hold");
  throw py::type_error(text);
}

// Converts a string that can be encoded as UTF-8.
inline std::string text_argument(const py::handle& value, const char* name) {
  const bool is_text = PyUnicode_Check(value.ptr()) != 0;
  Py_ssize_t size = 0;
  const char* const text = is_text ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (text != nullptr) return {text, static_cast<size_t>(size)};
  if (is_text) clear_refusal();
  const std::string what = std::string(name) + " is " + short_repr(value) + ": expected ";
  if (is_text) throw py::value_error(what + "text that UTF-8 can hold");
  throw py::type_error(what + "a string");
}

inline bool flag_argument(const py::handle& value, const char* name) {
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  throw py::type_error(std::string(name) + " is " + short_repr(value) + ": expected True or False");
}

// Converts an integer argument. Raises ValueError unless it is between `least` and `most`.
inline int64_t int_argument(const py::handle& value, const char* name, int64_t least,
                            int64_t most) {
  const int64_t number = int_argument(value, name);
  if (number >= least && number <= most) return number;
  throw py::value_error(std::string(name) + " is " + std::to_string(number) + ": expected " +
                        std::to_string(least) + " to " + std::to_string(most));
}

// Rejects a value whose length exceeds int32, before reading any of its entries.
inline void check_num_entries(const py::handle& value, const char* name) {
  const bool is_array = py::isinstance<py::array>(value);
  const Py_ssize_t size =
      is_array ? py::reinterpret_borrow<py::array>(value).size() : PyObject_Size(value.ptr());
  if (size < 0 && PyErr_ExceptionMatches(PyExc_ValueError)) {
    PyErr_Clear();
    throw py::type_error(std::string(name) + " has a length below 0: expected a sequence");
  }
  if (size < 0 && !PyErr_ExceptionMatches(PyExc_TypeError) &&
      !PyErr_ExceptionMatches(PyExc_OverflowError)) {
    throw py::error_already_set();
  }
  const bool is_beyond = size < 0 && PyErr_ExceptionMatches(PyExc_OverflowError);
  if (size < 0) PyErr_Clear();
  if (is_beyond || size > kMaxInt32) {
    throw py::value_error(std::string(name) + " has " +
                          (is_beyond ? "more than 2^63" : std::to_string(size)) +
                          " entries: expected at most " + std::to_string(kMaxInt32));
  }
}

// The int32 values of a one-dimensional integer sequence. C-contiguous int32 arrays are not copied,
// lists and tuples of ints are converted directly, and everything else is converted by numpy with
// range checks. Raises TypeError for floats, True and False, and ValueError for values beyond
// int32. `least` affects only the message for values beyond int32: the callee checks values that
// fit int32.
class Int32Input {
 public:
  Int32Input(const py::handle& value, const char* name, int64_t least = kMinInt32)
      : Int32Input(name, least) {
    if (py::isinstance<Int32Array>(value)) {
      auto array = py::reinterpret_borrow<Int32Array>(value);
      if (array.ndim() == 1) {
        borrow(std::move(array));
        return;
      }
    }
    if ((PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) && copy_ints(value)) return;
    borrow(convert(value));
  }
  Int32Input(const Int32Input&) = delete;

  // Returns the integers in a list or tuple from entry `first` on, with spare capacity. Raises
  // TypeError if an entry is not a Python int.
  static std::vector<int32_t> entries_behind(const py::handle& list, const char* name,
                                             py::ssize_t first) {
    Int32Input input(name, kMinInt32);
    input.copy_.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()) - first) + 256);
    if (!input.copy_ints(list, first)) {
      throw py::type_error(std::string(name) +
                           " contains an entry that is not an int: expected ints");
    }
    return std::move(input.copy_);
  }

  const int32_t* data() const { return data_; }
  py::ssize_t size() const { return size_; }

  // Copies values from memory that may change during a call.
  void copy_values() {
    if (data_ == copy_.data()) return;
    copy_.assign(data_, data_ + size_);
    data_ = copy_.data();
  }

 private:
  Int32Input(const char* name, int64_t least) : name_(name), least_(least) {}

  void borrow(Int32Array array) {
    data_ = array.data();
    size_ = array.size();
    owner_ = std::move(array);
  }

  static bool fits(int64_t v) { return v >= kMinInt32 && v <= kMaxInt32; }

  [[noreturn]] void fail_range(py::ssize_t i, const py::handle& value) const {
    throw py::value_error(std::string(name_) + "[" + std::to_string(i) + "] is " + repr_of(value) +
                          ": expected " +
                          (least_ == kMinInt32 ? std::string("a 32-bit integer")
                                               : std::to_string(least_) + " to 2147483647"));
  }

  // Rejects bools in a sequence of integers, because numpy would convert them to 0 or 1.
  void check_no_bool(const py::handle& value) const {
    static const auto* numpy_bool = new py::object(py::module_::import("numpy").attr("bool_"));
    for (py::ssize_t i = 0; i < size_; ++i) {
      const py::handle item = PySequence_Fast_GET_ITEM(value.ptr(), i);
      if (!PyBool_Check(item.ptr()) && !py::isinstance(item, *numpy_bool)) continue;
      throw py::type_error(std::string(name_) + "[" + std::to_string(i) + "] is " +
                           py::cast<std::string>(py::str(item)) + ": expected an integer");
    }
  }

  // Copies the integers of a list or tuple. Returns false if an item is not a Python int, in which
  // case numpy must convert the sequence.
  bool copy_ints(const py::handle& value, py::ssize_t first = 0) {
    PyObject** items = PySequence_Fast_ITEMS(value.ptr());
    size_ = PySequence_Fast_GET_SIZE(value.ptr());
    copy_.resize(static_cast<size_t>(size_ - first));
    for (py::ssize_t i = first; i < size_; ++i) {
      if (!PyLong_CheckExact(items[i])) {
        check_no_bool(value);
        return false;
      }
      int overflow = 0;
      const int64_t v = PyLong_AsLongLongAndOverflow(items[i], &overflow);
      if (overflow != 0 || !fits(v)) fail_range(i, items[i]);
      copy_[static_cast<size_t>(i - first)] = static_cast<int32_t>(v);
    }
    data_ = copy_.data();
    size_ -= first;
    return true;
  }

  Int32Array convert(const py::handle& value) const {
    check_num_entries(value, name_);
    if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
      // Also checks nested entries, because numpy descends into entries that are sequences.
      for (const py::handle& entry : value) check_num_entries(entry, name_);
    }
    py::array array;
    try {
      // numpy converts the entries of a range one by one, through 40 bytes each.
      array = PyRange_Check(value.ptr())
                  ? py::module_::import("numpy").attr("arange")(
                        value.attr("start"), value.attr("stop"), value.attr("step"))
                  : py::array(py::reinterpret_borrow<py::object>(value));
    } catch (py::error_already_set& error) {
      error.restore();
      clear_refusal();
      throw py::type_error(std::string(name_) + ": expected a one-dimensional array of integers");
    }
    const char kind = array.dtype().kind();
    if (kind == 'O') {
      throw py::type_error(std::string(name_) + " is " + short_repr(value) +
                           ": expected a sequence of integers");
    }
    if (array.size() > 0 && kind != 'i' && kind != 'u') {
      throw py::type_error(std::string(name_) + " has dtype " +
                           py::cast<std::string>(py::str(array.dtype())) + ": expected integers");
    }
    if (array.ndim() != 1) {
      throw py::value_error(std::string(name_) + " has " + std::to_string(array.ndim()) +
                            " dimensions: expected 1");
    }
    check_num_entries(array, name_);
    if (array.size() > 0 && array.itemsize() >= 4) check_range(array, kind == 'u');
    return py::array_t < int32_t, py::array::c_style | py::array::forcecast > (array);
  }

  void check_range(const py::array& array, bool is_unsigned) const {
    using Wide = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
    const Wide wide(array);  // an unsigned value beyond int64 becomes negative
    const int64_t* const values = wide.data();
    const py::ssize_t n = wide.size();
    uint64_t beyond = 0;  // without a branch, so that several values are checked at a time
    for (py::ssize_t i = 0; i < n; ++i) {
      const auto v = static_cast<uint64_t>(values[i]);
      beyond |= (v + (uint64_t{1} << 31)) >> 32 | (is_unsigned ? v >> 63 : 0);
    }
    for (py::ssize_t i = 0; beyond != 0 && i < n; ++i) {
      const int64_t v = values[i];
      if (!fits(v) || (is_unsigned && v < 0)) fail_range(i, array.attr("item")(i));
    }
  }

  const char* name_;
  int64_t least_;
  const int32_t* data_ = nullptr;
  py::ssize_t size_ = 0;
  py::object owner_;
  std::vector<int32_t> copy_;
};

// Converts several arrays to lists.
inline std::vector<std::vector<int32_t>> int32_lists(const py::list& arrays, const char* name) {
  std::vector<std::vector<int32_t>> out;
  for (const py::handle& each : arrays) {
    const Int32Input values(each, name);
    out.emplace_back(values.data(), values.data() + values.size());
  }
  return out;
}

// Returns [(values[0], values[1]), (values[2], values[3]), ...].
inline py::list list_of_pairs(const std::vector<int32_t>& values) {
  py::list out(values.size() / 2);
  for (size_t i = 0; i < values.size(); i += 2) {
    PyList_SET_ITEM(out.ptr(), static_cast<py::ssize_t>(i / 2),
                    py::make_tuple(values[i], values[i + 1]).release().ptr());
  }
  return out;
}

inline void require_same_length(py::ssize_t a, const char* a_name, py::ssize_t b,
                                const char* b_name) {
  if (a == b) return;
  throw py::value_error(std::string(a_name) + " has " + std::to_string(a) + " entries, but " +
                        b_name + " has " + std::to_string(b) + ": expected equal lengths");
}

}  // namespace kvcache
