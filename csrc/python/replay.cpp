// SPDX-License-Identifier: Apache-2.0
// Python bindings for replaying traces: parsing their lines.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <vector>

#include "python/arrays.h"

namespace kvcache {
namespace {

// Parses a JSON object whose fields are numbers, strings without escapes, and lists of integers
// from 0 to `most`. Anything else is left to a general parser.
class RecordParser {
 public:
  RecordParser(std::string_view text, int64_t most)
      : at_(text.data()), stop_(at_ + text.size()), most_(most) {}

  // Returns a dict in which lists are int64[n], or None if a general parser is needed.
  py::object parse() {
    py::dict found;
    if (!takes('{')) return py::none();
    do {
      const py::object name = string();
      if (!name || !takes(':')) return py::none();
      const py::object value = this->value();
      if (!value) return py::none();
      found[name] = value;
    } while (takes(','));
    if (!takes('}')) return py::none();
    skip();
    if (at_ != stop_) return py::none();
    return std::move(found);
  }

 private:
  // The functions below that return an object return null for unsupported input.
  static constexpr int64_t kMost = int64_t{1} << 59;  // ten times this number still fits into int64

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  char next() const { return at_ < stop_ ? *at_ : '\0'; }
  void skip() {
    while (at_ < stop_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
  }
  bool takes(char wanted) {
    skip();
    if (next() != wanted || at_ == stop_) return false;
    ++at_;
    return true;
  }
  py::object value() {
    skip();
    if (next() == '"') return string();
    if (next() == '[') return list();
    return number();
  }
  py::object string() {
    if (!takes('"')) return {};
    const char* const begin = at_;
    while (at_ < stop_ && *at_ != '"') {
      if (*at_ == '\\' || static_cast<unsigned char>(*at_) < 0x20) return {};
      ++at_;
    }
    if (at_ == stop_) return {};
    PyObject* text = PyUnicode_DecodeUTF8(begin, at_ - begin, nullptr);
    ++at_;
    if (text == nullptr) clear_refusal();  // invalid UTF-8
    return py::reinterpret_steal<py::object>(text);
  }
  // Returns an integer from 0 to `kMost`, or -1 for anything else.
  int64_t whole() {
    const char* const begin = at_;
    int64_t value = 0;
    for (; at_ < stop_ && is_digit(*at_); ++at_) {
      value = 10 * value + (*at_ - '0');
      if (value > kMost) return -1;
    }
    if (at_ == begin || (*begin == '0' && at_ - begin > 1)) return -1;
    return value;
  }
  py::object number() {
    const char* const begin = at_;
    if (next() == '-') ++at_;
    const int64_t value = whole();
    if (value < 0) return {};
    const bool has_fraction = next() == '.';
    if (has_fraction) {
      ++at_;
      if (!is_digit(next())) return {};
      while (is_digit(next())) ++at_;
    }
    if (next() == 'e' || next() == 'E') return {};
    if (!has_fraction) return py::int_(*begin == '-' ? -value : value);
    const py::str text(begin, static_cast<size_t>(at_ - begin));
    PyObject* real = PyFloat_FromString(text.ptr());
    if (real == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(real);
  }
  py::object list() {
    if (!takes('[')) return {};
    std::vector<int64_t> found;
    if (takes(']')) return copy_array(found);
    found.reserve(static_cast<size_t>(stop_ - at_) / 4);
    do {
      skip();
      const int64_t value = whole();
      if (value < 0 || value > most_) return {};
      found.push_back(value);
    } while (takes(','));
    return takes(']') ? copy_array(found) : py::object();
  }

  const char* at_;
  const char* const stop_;
  const int64_t most_;
};

py::object parse_record(const py::bytes& text, const py::object& most) {
  return RecordParser(text, int_argument(most, "most")).parse();
}

}  // namespace

void bind_replay(py::module_& m) {
  m.def("parse_record", &parse_record, py::arg("text"), py::arg("most"),
        "Return a JSON object as a dict in which lists of whole numbers from 0 to `most` are "
        "int64[n],\n"
        "or None if it has any other value than such lists, numbers and strings without escapes.");
}

}  // namespace kvcache
