// Ages in buckets, each wider than the one before by the square root of two.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace kvcache {

// An age is a number of ticks of a policy's clock. The last bucket has no end.
class AgeBuckets {
 public:
  static constexpr int kNum = 26;

  explicit AgeBuckets(double unit) {  // ticks of the first bucket
    double width = unit;
    for (int b = 0; b < kNum; ++b) {
      begin_[b + 1] = begin_[b] + width;
      width *= std::sqrt(2.0);
    }
  }

  double begin(int bucket) const { return begin_[bucket]; }
  double width(int bucket) const { return begin_[bucket + 1] - begin_[bucket]; }
  int of(int64_t age) const {
    const auto end = begin_.begin() + kNum;
    const auto above = std::upper_bound(begin_.begin() + 1, end, static_cast<double>(age));
    return static_cast<int>(above - begin_.begin()) - 1;
  }

 private:
  std::array<double, kNum + 1> begin_{};
};

}  // namespace kvcache
