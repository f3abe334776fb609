// SPDX-License-Identifier: Apache-2.0
// Determines exactly whether two tensors that an op writes share memory. K and V may be columns,
// heads or halves of the pages in one tensor. The byte ranges that they span then overlap, although
// no elements do.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/checks.h"

namespace kvcache {

// A dimension that can add `stride` times any number from `least` to `most` to a distance.
struct Steps {
  int64_t stride, least, most;
};

constexpr int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Returns whether `distance` plus steps in dimensions steps[i] and later can lie between `least`
// and `most`. Strides are in descending order. If strides nest, as in tensors, only a few multiples
// of each stride need to be tried. Otherwise, `budget` bounds the search; when it is exhausted, the
// result is true.
inline bool can_reach(const std::vector<Steps>& steps, size_t i, int64_t distance, int64_t least,
                      int64_t most, int64_t& budget) {
  if (--budget < 0) return true;
  if (i == steps.size()) return least <= distance && distance <= most;
  // The range that this step must reach before the later steps contribute.
  const int64_t wanted_least = least, wanted_most = most;
  for (size_t j = i + 1; j < steps.size(); ++j) {
    least -= steps[j].most * steps[j].stride;
    most -= steps[j].least * steps[j].stride;
  }
  const auto& [stride, fewest, highest] = steps[i];
  const int64_t begin = std::max(fewest, -floor_divide(distance - least, stride));
  const int64_t end = std::min(highest, floor_divide(most - distance, stride));
  for (int64_t n = begin; n <= end; ++n) {
    if (can_reach(steps, i + 1, distance + n * stride, wanted_least, wanted_most, budget))
      return true;
  }
  return false;
}

inline bool share_memory(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  std::vector<Steps> steps;
  const auto add = [&](const Tensor& t, bool forward) {
    for (int64_t i = 0; i < t.dim(); ++i) {
      const int64_t stride = t.stride(i) * static_cast<int64_t>(t.element_size());
      const int64_t most = t.size(i) - 1;
      if (most == 0 || stride == 0) continue;
      auto same = std::find_if(steps.begin(), steps.end(),
                               [&](const Steps& s) { return s.stride == stride; });
      if (same == steps.end()) same = steps.insert(steps.end(), {stride, 0, 0});
      (forward ? same->most : same->least) += forward ? most : -most;
    }
  };
  add(a, false);
  add(b, true);
  std::sort(steps.begin(), steps.end(),
            [](const Steps& x, const Steps& y) { return x.stride > y.stride; });
  const int64_t distance = static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data_ptr()) -
                                                reinterpret_cast<uintptr_t>(a.data_ptr()));
  int64_t budget = 1 << 16;
  return can_reach(steps, 0, distance, 1 - static_cast<int64_t>(b.element_size()),
                   static_cast<int64_t>(a.element_size()) - 1, budget);
}

inline void check_separate(const Tensor& written, const char* name, const Tensor& also,
                           const char* also_name) {
  if (share_memory(written, also)) {
    fail(std::string(name) + " shares memory with " + also_name +
         ": expected separate memory, because both are written");
  }
}

}  // namespace kvcache
