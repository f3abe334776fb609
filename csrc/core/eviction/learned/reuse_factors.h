// SPDX-License-Identifier: Apache-2.0
// Estimates how each feature of a request changes the probability of reuse.
#pragma once

#include <algorithm>
#include <array>

#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/reuse_class.h"

namespace kvcache {

// Counts of sampled blocks in an age bucket.
struct ReuseCount {
  double reached, used;
};
using ReuseCounts = std::array<ReuseCount, AgeBuckets::kNum>;
using ReuseHazards = std::array<double, AgeBuckets::kNum>;

// Most classes have too few samples to estimate the probability of reuse at every age. This model
// therefore uses the probability over all blocks, times one factor per feature of the class. A
// factor depends on the level of the feature and on the range of ages. The factors are fitted by
// iterative proportional fitting, such that for each level and range, the expected number of uses
// equals the observed number.
class ReuseFactors {
 public:
  using CountsOfClasses = std::array<ReuseCounts, ReuseClass::kNum>;

  ReuseFactors() {
    for (auto& of_feature : factors_) {
      for (auto& of_level : of_feature) of_level.fill(1);
    }
  }

  // The probability that a block of a class of own blocks is used in this age bucket, if the
  // probability over all blocks is `of_all`.
  double hazard(int own, int bucket, double of_all) const {
    const int r = range_of(bucket);
    return std::min(of_all * factors_[0][level_of(0, own)][r] * factors_[1][level_of(1, own)][r] *
                        factors_[2][level_of(2, own)][r],
                    kMost);
  }

  // Refits the factors, starting from the current ones. Two rounds suffice, because the factors
  // change slowly.
  void fit(const CountsOfClasses& counts, const ReuseHazards& of_all) {
    for (int round = 0; round < 2; ++round) {
      for (int feature = 0; feature < kFeatures; ++feature) fit_feature(feature, counts, of_all);
    }
  }

 private:
  static constexpr int kFeatures = 3, kLevels = 6;
  static constexpr int kInRange = 4;  // buckets in a range of ages
  static constexpr int kRanges = (AgeBuckets::kNum + kInRange - 1) / kInRange;
  static constexpr double kPriorUses = 30;  // weight of the prior factor 1, in uses
  static constexpr double kLeastFactor = 0.001, kMostFactor = 100, kMost = 0.98;
  static_assert(ReuseClass::kGaps <= kLevels && ReuseClass::kAnswers <= kLevels);

  static int range_of(int bucket) { return bucket / kInRange; }
  static int level_of(int feature, int own) {
    return feature == 0   ? ReuseClass::answer_of(own)
           : feature == 1 ? ReuseClass::added_of(own)
                          : ReuseClass::gap_of(own);
  }
  void fit_feature(int feature, const CountsOfClasses& counts, const ReuseHazards& of_all) {
    double observed[kLevels][kRanges] = {}, expected[kLevels][kRanges] = {};
    for (int own = 0; own < ReuseClass::kOwn; ++own) {
      const int level = level_of(feature, own);
      for (int b = 0; b < AgeBuckets::kNum; ++b) {
        const ReuseCount& count = counts[own][b];
        if (count.reached == 0) continue;
        observed[level][range_of(b)] += count.used;
        expected[level][range_of(b)] += count.reached * hazard(own, b, of_all[b]);
      }
    }
    for (int level = 0; level < kLevels; ++level) {
      for (int r = 0; r < kRanges; ++r) {
        double& factor = factors_[feature][level][r];
        factor *= (observed[level][r] + kPriorUses) / (expected[level][r] + kPriorUses);
        factor = std::clamp(factor, kLeastFactor, kMostFactor);
      }
    }
  }

  std::array<std::array<std::array<double, kRanges>, kLevels>, kFeatures> factors_;
};

}  // namespace kvcache
