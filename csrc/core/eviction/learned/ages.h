// SPDX-License-Identifier: Apache-2.0
// Age buckets, each wider than the previous one by a factor of the square root of two.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace kvcache {

// Ages are measured in ticks of the policy's clock. The last bucket is unbounded.
class AgeBuckets {
 public:
  static constexpr int kNum = 26;

  explicit AgeBuckets(double unit) {  // width of the first bucket
    double width = unit;
    for (int b = 0; b < kNum; ++b) {
      begin_[b + 1] = begin_[b] + width;
      first_[b + 1] = static_cast<int64_t>(std::ceil(begin_[b + 1]));
      width *= std::sqrt(2.0);
    }
  }

  double begin(int bucket) const { return begin_[bucket]; }
  int64_t first(int bucket) const { return first_[bucket]; }  // lowest age in the bucket
  double width(int bucket) const { return begin_[bucket + 1] - begin_[bucket]; }
  int of(int64_t age) const {
    const auto above = std::upper_bound(first_.begin() + 1, first_.begin() + kNum, age);
    return static_cast<int>(above - first_.begin()) - 1;
  }

 private:
  std::array<double, kNum + 1> begin_{};
  std::array<int64_t, kNum + 1> first_{};
};

}  // namespace kvcache
