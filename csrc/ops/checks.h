// Checks of op arguments, shared by the CPU and the CUDA side. Each error names the argument, what
// came and what was expected, and comes before anything is written.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/switches.h"

namespace kvcache {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& text) { throw std::runtime_error(text); }

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

inline std::string device_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

inline void check_dtype(const Tensor& t, const char* name,
                        std::initializer_list<ScalarType> any_of) {
  std::string expected;
  for (ScalarType type : any_of) {
    if (t.scalar_type() == type) return;
    expected += (expected.empty() ? "" : " or ") + std::string(torch::headeronly::toString(type));
  }
  fail(std::string(name) + " has dtype " + torch::headeronly::toString(t.scalar_type()) +
       ": expected " + expected);
}

inline void check_dim(const Tensor& t, const char* name, int64_t dim, const char* shape) {
  if (t.dim() != dim) fail(std::string(name) + " has shape " + shape_of(t) + ": expected " + shape);
}

inline void check_contiguous(const Tensor& t, const char* name) {
  if (!t.is_contiguous())
    fail(std::string(name) + " is not contiguous: expected a contiguous tensor");
}

// Checks that no two elements of a tensor that is written share memory: each dimension, from the
// innermost one outwards, steps over everything inside it.
inline void check_no_overlap(const Tensor& t, const char* name) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) == 0) return;
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) {
      fail(std::string(name) + " has elements that share memory (stride " + std::to_string(stride) +
           "): expected none, as it is written");
    }
    extent = stride * size;
  }
}

// The bytes from the first element of a tensor to its last. Without elements, none.
struct ByteSpan {
  uintptr_t begin = 0, end = 0;

  bool meets(const ByteSpan& other) const { return begin < other.end && other.begin < end; }
  ByteSpan moved(int64_t bytes) const {
    return {begin + static_cast<uintptr_t>(bytes), end + static_cast<uintptr_t>(bytes)};
  }
};

inline ByteSpan span_of(const Tensor& t) {
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) == 0) return {};
    last += (t.size(i) - 1) * t.stride(i);
  }
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  return {begin, begin + static_cast<uintptr_t>(last + 1) * t.element_size()};
}

[[noreturn]] inline void fail_shared(const std::string& written, const char* other) {
  fail(written + " shares memory with " + other + ": expected memory of its own");
}

// An argument of an op; no tensor where an optional one is not given.
struct NamedTensor {
  NamedTensor(const char* name, const Tensor& t) : name(name), tensor(&t) {}
  NamedTensor(const char* name, const std::optional<Tensor>& t)
      : name(name), tensor(t ? &*t : nullptr) {}

  const char* name;
  const Tensor* tensor;
};

// Checks that no tensor that is written shares memory with one that is read, by the bytes that both
// span. Every op lists all its tensors here but those that it copies before it writes.
inline void check_disjoint(std::initializer_list<NamedTensor> written,
                           std::initializer_list<NamedTensor> read) {
  for (const NamedTensor& out : written) {
    if (out.tensor == nullptr) continue;
    const ByteSpan span = span_of(*out.tensor);
    for (const NamedTensor& in : read) {
      if (in.tensor != nullptr && span.meets(span_of(*in.tensor))) fail_shared(out.name, in.name);
    }
  }
}

// a * b + c, or nothing where int64 cannot hold it.
inline std::optional<int64_t> multiply_add(int64_t a, int64_t b, int64_t c) {
  int64_t product = 0, sum = 0;
  if (__builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(product, c, &sum)) return {};
  return sum;
}

inline void check_size(const Tensor& t, const char* name, int64_t dim, int64_t expected,
                       const char* why) {
  if (t.size(dim) == expected) return;
  fail(std::string(name) + " has shape " + shape_of(t) + ": expected size " +
       std::to_string(expected) + " in dimension " + std::to_string(dim) + ", " + why);
}

inline void check_same_device(const Tensor& t, const char* name, const Tensor& other,
                              const char* other_name) {
  if (t.is_cpu() == other.is_cpu() && t.is_cuda() == other.is_cuda() &&
      (t.is_cpu() || t.get_device_index() == other.get_device_index())) {
    return;
  }
  fail(std::string(name) + " is on " + device_of(t) + ": expected " + device_of(other) +
       ", where " + other_name + " is");
}

inline void check_same_dtype(const Tensor& t, const char* name, const Tensor& other,
                             const char* other_name) {
  if (t.scalar_type() == other.scalar_type()) return;
  fail(std::string(name) + " has dtype " + torch::headeronly::toString(t.scalar_type()) +
       ": expected " + torch::headeronly::toString(other.scalar_type()) + " as " + other_name +
       " has");
}

}  // namespace kvcache
