// SPDX-License-Identifier: Apache-2.0
// Checks of op arguments, shared by CPU and CUDA code. Each error states the argument, its value
// and the expected value. All checks precede the first write.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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

inline bool is_same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() &&
         (a.is_cpu() || a.get_device_index() == b.get_device_index());
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

inline void check_defined(const Tensor& t, const char* name) {
  if (!t.defined()) fail(std::string(name) + " is None: expected a tensor");
}

inline void check_dim(const Tensor& t, const char* name, int64_t dim, const char* shape) {
  check_defined(t, name);
  if (t.dim() != dim) fail(std::string(name) + " has shape " + shape_of(t) + ": expected " + shape);
}

inline void check_contiguous(const Tensor& t, const char* name) {
  if (!t.is_contiguous())
    fail(std::string(name) + " is not contiguous: expected a contiguous tensor");
}

// Checks that no two elements of a tensor to be written share memory. The stride of each dimension
// must exceed the extent of all inner dimensions.
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
           "): expected separate memory for each element, because the tensor is written");
    }
    extent = stride * size;
  }
}

// A range of addresses in bytes, without `end`.
struct ByteSpan {
  uintptr_t begin = 0, end = 0;

  bool meets(const ByteSpan& other) const { return begin < other.end && other.begin < end; }
  bool holds(const ByteSpan& other) const { return begin <= other.begin && other.end <= end; }
  ByteSpan moved(int64_t bytes) const {
    return {begin + static_cast<uintptr_t>(bytes), end + static_cast<uintptr_t>(bytes)};
  }
};

// Returns the byte range from a tensor's first element to the end of its last element. The range is
// empty for an empty tensor.
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

// An argument of an op. An optional argument that is not given has no tensor.
struct NamedTensor {
  NamedTensor(const char* name, const Tensor& t) : name(name), tensor(&t) {}
  NamedTensor(const char* name, const std::optional<Tensor>& t)
      : name(name), tensor(t ? &*t : nullptr) {}

  const char* name;
  const Tensor* tensor;
};
using NamedTensors = std::vector<NamedTensor>;

// Checks that written tensors share no memory with read tensors, by comparing the byte ranges that
// they span. Every op passes all of its tensors, except those that it copies before the first
// write.
inline void check_disjoint(const NamedTensors& written, const NamedTensors& read) {
  for (const NamedTensor& out : written) {
    if (out.tensor == nullptr) continue;
    const ByteSpan span = span_of(*out.tensor);
    for (const NamedTensor& in : read) {
      if (in.tensor != nullptr && span.meets(span_of(*in.tensor))) fail_shared(out.name, in.name);
    }
  }
}

// Returns the byte range of a tensor's storage, or an empty range for an empty tensor, for which
// torch reports no address.
inline ByteSpan storage_of(const Tensor& t) {
  if (t.numel() == 0) return {};
  int64_t offset = 0, bytes = 0;
  if (aoti_torch_get_storage_offset(t.get(), &offset) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_storage_size(t.get(), &bytes) != AOTI_TORCH_SUCCESS) {
    fail("a tensor has no storage: expected dense tensors");
  }
  const auto begin =
      reinterpret_cast<uintptr_t>(t.data_ptr()) - static_cast<uintptr_t>(offset) * t.element_size();
  return {begin, begin + static_cast<uintptr_t>(bytes)};
}

using Owners = std::optional<std::vector<Tensor>>;

// The memory that an op may access by offsets: the storages of an argument and of `owners`, which
// must be on the argument's device. Adjacent storages count as one storage.
class Reach {
 public:
  Reach(std::initializer_list<NamedTensor> arguments, const Owners& owners) {
    for (const NamedTensor& each : arguments) {
      if (each.tensor != nullptr) spans_.push_back(storage_of(*each.tensor));
    }
    for (size_t i = 0; owners && i < owners->size(); ++i) {
      check_owner((*owners)[i], i, arguments);
      spans_.push_back(storage_of((*owners)[i]));
    }
    if (spans_.size() == 1) return;
    std::sort(spans_.begin(), spans_.end(),
              [](const ByteSpan& a, const ByteSpan& b) { return a.begin < b.begin; });
    size_t last = 0;
    for (size_t i = 1; i < spans_.size(); ++i) {
      if (spans_[i].begin <= spans_[last].end) {
        spans_[last].end = std::max(spans_[last].end, spans_[i].end);
      } else {
        spans_[++last] = spans_[i];
      }
    }
    spans_.resize(last + 1);
  }

  // An empty span lies in any memory.
  bool holds(const ByteSpan& span) const {
    if (span.begin == span.end) return true;
    const auto after = std::upper_bound(
        spans_.begin(), spans_.end(), span.begin,
        [](uintptr_t address, const ByteSpan& each) { return address < each.begin; });
    return after != spans_.begin() && (after - 1)->holds(span);
  }

 private:
  static void check_owner(const Tensor& owner, size_t i,
                          std::initializer_list<NamedTensor> arguments) {
    for (const NamedTensor& each : arguments) {
      if (each.tensor != nullptr && is_same_device(owner, *each.tensor)) return;
    }
    fail("owners[" + std::to_string(i) + "] is on " + device_of(owner) +
         ": expected the device of " + arguments.begin()[arguments.size() - 1].name);
  }

  std::vector<ByteSpan> spans_;
};

// Returns a * b + c, or nothing on an int64 overflow.
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
  if (is_same_device(t, other)) return;
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
