// Hashes between Python and the native code: uint8[n, 32] arrays, and 32 bytes.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "core/hash.h"

namespace kvcache {

namespace py = pybind11;

using HashArray = py::array_t<uint8_t, py::array::c_style>;

inline HashArray hash_array(const py::handle& value, const char* name) {
  if (py::isinstance<HashArray>(value)) {
    auto array = py::reinterpret_borrow<HashArray>(value);
    if (array.ndim() == 2 && array.shape(1) == sizeof(Hash)) return array;
  }
  throw py::type_error(std::string(name) +
                       ": expected a C-contiguous uint8 array of shape [n, 32]");
}

inline const Hash* as_hashes(const HashArray& array) {
  static_assert(alignof(Hash) == 1);
  return reinterpret_cast<const Hash*>(array.data());
}

inline Hash hash_of(const std::string& bytes, const char* name) {
  if (bytes.size() != sizeof(Hash)) {
    throw py::value_error(std::string(name) + " has " + std::to_string(bytes.size()) +
                          " bytes: expected 32");
  }
  Hash hash;
  std::memcpy(hash.bytes, bytes.data(), sizeof(Hash));
  return hash;
}

inline py::bytes as_bytes(const Hash& hash) {
  return py::bytes(reinterpret_cast<const char*>(hash.bytes), sizeof(Hash));
}

inline HashArray copy_hashes(const Hash* hashes, size_t n) {
  HashArray out({n, sizeof(Hash)});
  if (n > 0) std::memcpy(out.mutable_data(), hashes, n * sizeof(Hash));
  return out;
}

}  // namespace kvcache
