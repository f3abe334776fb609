// SPDX-License-Identifier: Apache-2.0
// Methods of bound classes that use CPython's own calling convention, because pybind11's dispatch
// would take longer than a short call itself.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace kvcache {

namespace py = pybind11;

// Translates the current exception in the same way as pybind11 does for its own functions.
inline void raise_current() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// Returns the object on which a method was called. Throws TypeError if the object was not
// initialized.
template <class T>
T& self_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  auto* value = static_cast<T*>(instance->get_value_and_holder().value_ptr());
  if (value == nullptr) {
    throw py::type_error(std::string("__init__() of ") + Py_TYPE(self)->tp_name +
                         " was not called");
  }
  return *value;
}

// Adds a method with `kNumArguments` positional arguments that is implemented by
// `kFunction(self, arguments)`, which returns a new reference. Its definition is leaked, because it
// must live as long as the method.
template <class T, size_t kNumArguments, PyObject* (*kFunction)(T&, PyObject* const*)>
void def_fast(const py::object& type, const char* name) {
  constexpr auto call = [](PyObject* self, PyObject* const* args,
                           Py_ssize_t num_args) noexcept -> PyObject* {
    try {
      if (num_args != static_cast<Py_ssize_t>(kNumArguments)) {
        throw py::type_error("got " + std::to_string(num_args) + " arguments: expected " +
                             std::to_string(kNumArguments));
      }
      return kFunction(self_of<T>(self), args);
    } catch (...) {
      raise_current();
      return nullptr;
    }
  };
  PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) noexcept = call;
  auto* definition =
      new PyMethodDef{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                      METH_FASTCALL, nullptr};
  auto method = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), definition));
  if (!method) throw py::error_already_set();
  type.attr(name) = method;
}

}  // namespace kvcache
