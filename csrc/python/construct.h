// SPDX-License-Identifier: Apache-2.0
// Constructors for Python classes that handle running out of memory.
//
// If pybind11 runs out of memory while it registers a new object, it frees the object twice or
// terminates the process. These constructors free the object once and raise MemoryError.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace kvcache {

namespace py = pybind11;

template <class Make, class Signature = py::detail::function_signature_t<Make>>
class Constructor;

template <class Make, class Holder, class... Args>
class Constructor<Make, Holder(Args...)> {
 public:
  explicit Constructor(Make make) : make_(std::move(make)) {}

  void operator()(py::detail::value_and_holder& self, Args... args) const {
    Holder made = make_(std::forward<Args>(args)...);
    self.value_ptr() = made.get();
    try {
      self.type->init_instance(self.inst, &made);
    } catch (...) {
      self.value_ptr() = nullptr;
      throw;
    }
  }

 private:
  Make make_;
};

// Equivalent to `def(py::init(make), extra...)`. `make` returns the class's holder (std::unique_ptr
// or std::shared_ptr).
template <class Class, class Make, class... Extra>
Class def_init(Class of, Make make, const Extra&... extra) {
  of.def("__init__", Constructor<Make>(std::move(make)), py::detail::is_new_style_constructor(),
         extra...);
  return of;
}

// Returns an object that uses memory of these Python objects and keeps them alive.
// (`py::keep_alive` terminates the process if it runs out of memory.)
template <class T, class... Owners>
std::shared_ptr<T> over(std::unique_ptr<T> made, Owners... owners) {
  return std::shared_ptr<T>(made.release(), [owners...](T* gone) { delete gone; });
}

}  // namespace kvcache
