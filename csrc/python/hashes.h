// SPDX-License-Identifier: Apache-2.0
// Converts hashes between Python and native code, as uint8[n, 32] arrays and 32-byte values. In
// native code, shorter hashes are padded with zeros.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace kvcache {

namespace py = pybind11;

// The prompt length in tokens below which hashing is faster than passing the GIL to another thread.
constexpr int64_t kUnlockedTokens = 4096;

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

// Returns the hashes in a uint8[n, num_bytes] array.
inline std::vector<Hash> hashes_of_rows(const py::handle& value, const char* name,
                                        int64_t num_bytes) {
  if (py::isinstance<HashArray>(value)) {
    const auto array = py::reinterpret_borrow<HashArray>(value);
    if (array.ndim() == 2 && array.shape(1) == num_bytes) {
      std::vector<Hash> out(static_cast<size_t>(array.shape(0)));
      for (size_t i = 0; i < out.size(); ++i) {
        std::memcpy(out[i].bytes, array.data(static_cast<py::ssize_t>(i), 0),
                    static_cast<size_t>(num_bytes));
      }
      return out;
    }
  }
  throw py::type_error(std::string(name) + ": expected a C-contiguous uint8 array of shape [n, " +
                       std::to_string(num_bytes) + "]");
}

inline Hash hash_of(std::string_view bytes, const char* name, int64_t num_bytes = sizeof(Hash)) {
  if (static_cast<int64_t>(bytes.size()) != num_bytes) {
    throw py::value_error(std::string(name) + " has " + std::to_string(bytes.size()) +
                          " bytes: expected " + std::to_string(num_bytes));
  }
  Hash hash{};
  std::memcpy(hash.bytes, bytes.data(), bytes.size());
  return hash;
}

inline py::bytes as_bytes(const Hash& hash, int64_t num_bytes = sizeof(Hash)) {
  return py::bytes(reinterpret_cast<const char*>(hash.bytes), static_cast<size_t>(num_bytes));
}

inline HashArray copy_hashes(const Hash* hashes, size_t n, int64_t num_bytes = sizeof(Hash)) {
  const auto width = static_cast<size_t>(num_bytes);
  HashArray out({n, width});
  uint8_t* p = out.mutable_data();
  if (width == sizeof(Hash)) {
    if (n > 0) std::memcpy(p, hashes, n * sizeof(Hash));
    return out;
  }
  for (size_t i = 0; i < n; ++i) std::memcpy(p + i * width, hashes[i].bytes, width);
  return out;
}

}  // namespace kvcache
