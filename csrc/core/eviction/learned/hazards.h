// SPDX-License-Identifier: Apache-2.0
// Estimates the probability that a block is used again, by class and age, and the value of keeping
// it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_factors.h"

namespace kvcache {

// Counts, per class and age bucket, the sampled blocks that reached the bucket, and those used
// again within it. These counts yield the Gittins index of a class at an age: the highest ratio,
// over all stopping ages, of the expected number of hits to the time for which the block is kept.
class Hazards {
 public:
  static constexpr int kBuckets = AgeBuckets::kNum;

  explicit Hazards(const AgeBuckets& ages) : ages_(ages) { solve(); }

  void reach(int reuse_class, int bucket) {
    counts_[reuse_class][bucket].reached += 1;
    is_counted_[reuse_class] = true;
  }
  // Counts a use of a block that has already been counted as reaching this bucket.
  void use(int reuse_class, int bucket) { counts_[reuse_class][bucket].used += 1; }

  // Returns all counts by class and bucket: first the blocks that reached each bucket, then the
  // blocks that were used in it.
  std::vector<double> counts() const {
    std::vector<double> found;
    for (const auto count : {&ReuseCount::reached, &ReuseCount::used}) {
      for (const auto& of_class : counts_) {
        for (const ReuseCount& each : of_class) found.push_back(each.*count);
      }
    }
    return found;
  }
  void set_counts(const std::vector<double>& counts) {
    auto next = counts.begin();
    for (const auto count : {&ReuseCount::reached, &ReuseCount::used}) {
      for (auto& of_class : counts_) {
        for (ReuseCount& each : of_class) each.*count = *next++;
      }
    }
    is_counted_.fill(true);
    solve();
  }

  // Decays old counts.
  void fade() {
    for (int c = 0; c < ReuseClass::kNum; ++c) {
      if (!is_counted_[c]) continue;
      for (ReuseCount& each : counts_[c]) {
        each.reached *= kKept;
        each.used *= kKept;
      }
    }
  }

  // Returns the Gittins index of a block of this class and age, in hits per tick.
  double index(int reuse_class, int64_t age) const {
    const int b = ages_.of(age);
    const double here = solved_[reuse_class].index[b];
    if (b + 1 == kBuckets) return here;
    const double share = (static_cast<double>(age) - ages_.begin(b)) / ages_.width(b);
    return here + share * (solved_[reuse_class].index[b + 1] - here);
  }

  // Returns the expected number of hits of a block of this class and age, each weighted by `cost`,
  // minus `price` for each tick until the optimal stopping age.
  double gain(int reuse_class, int64_t age, double cost, double price) const {
    const int first = ages_.of(age);
    double alive = 1, gain = 0, best = 0;
    for (int b = first; b < kBuckets; ++b) {
      double share = 1;  // remaining fraction of the bucket
      if (b == first && b + 1 < kBuckets) {
        share = (ages_.begin(b + 1) - static_cast<double>(age)) / ages_.width(b);
      }
      const double hazard = share * solved_[reuse_class].hazard[b];
      gain += alive * (hazard * cost - price * share * ages_.width(b) * (1 - hazard / 2));
      alive *= 1 - hazard;
      best = std::max(best, gain);
    }
    return best;
  }

  // Recomputes all indices.
  void solve() {
    Row of_all;
    for (int b = 0; b < kBuckets; ++b) {
      ReuseCount sum{};
      for (const auto& of_class : counts_) {
        sum.reached += of_class[b].reached;
        sum.used += of_class[b].used;
      }
      of_all[b] = std::min((sum.used + kOfAll * kPrior) / (sum.reached + kOfAll), 1.0);
      if (b > 0) of_all[b] = std::max(of_all[b], kLeastFall * of_all[b - 1]);
    }
    const Solved unknown{of_all, index_of(of_all)};
    factors_.fit(counts_, of_all);
    for (int c = 0; c < ReuseClass::kOwn; ++c) solved_[c] = solved_own(c, unknown);
    for (int c = ReuseClass::kOwn; c < ReuseClass::kNum; ++c) {
      solved_[c] = is_counted_[c] ? solved(counts_[c], of_all) : unknown;
    }
  }

 private:
  using Counts = ReuseCounts;
  using Row = ReuseHazards;
  struct Solved {
    Row hazard, index;
  };

  static constexpr double kKept = 0.997;  // decay factor of the counts
  static constexpr double kOfClass = 60;  // weight of a class's expected hazard, in samples
  static constexpr double kOfAll = 30;    // weight of the prior, in samples
  // Prior probability of use per bucket. Per tick, it decreases with age.
  static constexpr double kPrior = 0.02;
  // Minimum ratio of the hazard in a bucket to that in the previous bucket, over all classes.
  static constexpr double kLeastFall = 0.8;

  // `prior` dominates in buckets where a class has little data.
  Solved solved(const Counts& counts, const Row& prior) const {
    Row hazard;
    for (int b = 0; b < kBuckets; ++b) {
      const ReuseCount& count = counts[b];
      // The ratio may exceed 1: a block is counted as reaching a bucket before it is counted as
      // used, so the count of blocks that reached the bucket has decayed more.
      hazard[b] = std::min((count.used + kOfClass * prior[b]) / (count.reached + kOfClass), 1.0);
    }
    return {hazard, index_of(hazard)};
  }
  Row index_of(const Row& hazard) const {
    Row index;
    for (int first = 0; first < kBuckets; ++first) {
      double alive = 1, hits = 0, ticks = 0, best_hits = 0, best_ticks = 1;
      for (int b = first; b < kBuckets; ++b) {
        hits += alive * hazard[b];
        ticks += alive * ages_.width(b) * (1 - hazard[b] / 2);
        alive *= 1 - hazard[b];
        if (hits * best_ticks > best_hits * ticks) best_hits = hits, best_ticks = ticks;
      }
      index[first] = best_hits / best_ticks;
    }
    return index;
  }
  Solved solved_own(int own, const Solved& unknown) const {
    const auto is_reached = [](const ReuseCount& count) { return count.reached > 0; };
    if (std::none_of(counts_[own].begin(), counts_[own].end(), is_reached)) return unknown;
    Row expected;
    for (int b = 0; b < kBuckets; ++b) expected[b] = factors_.hazard(own, b, unknown.hazard[b]);
    return solved(counts_[own], expected);
  }

  AgeBuckets ages_;
  ReuseFactors factors_;
  std::array<Counts, ReuseClass::kNum> counts_{};
  std::array<bool, ReuseClass::kNum> is_counted_{};
  std::array<Solved, ReuseClass::kNum> solved_{};
};

}  // namespace kvcache
