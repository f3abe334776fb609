// SPDX-License-Identifier: Apache-2.0
// Estimates the probability that a block is used again, by class and age, and the value of keeping
// it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/eviction/learned/constants.h"
#include "core/eviction/learned/keyed_array.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/hash.h"

namespace kvcache {

// Keeps a ring of samples of released blocks, cached or not, by key. From time to time it counts,
// per class and age bucket, the samples that reached the bucket and those used again within it.
// The value of a class at an age is its Gittins index: the highest ratio, over all stopping ages,
// of the expected number of hits to the time for which the block is kept.
class Hazards {
 public:
  static constexpr int kBuckets = 30;  // the last one is unbounded
  struct Record {
    uint32_t key;
    uint32_t time : 25;  // ticks of 64 ms, modulo 24 days
    uint32_t reuse_class : 7;
    uint16_t next;  // next record with the same head
    uint8_t weight;
    uint8_t bucket : 7;  // of the age at which it was used; kUnused
    uint8_t is_end : 1;  // whether a request ended with the block
  };
  static_assert(sizeof(Record) == 12 && ReuseClass::kNum <= 128);

  Hazards() : records_(learned::kRecords) {
    for (int b = 0; b <= kBuckets; ++b) {
      begin_[b] = learned::kAge * (std::pow(learned::kAgeRatio, b) - 1);
    }
    solve(0);  // no samples: the priors
  }

  // Returns a key that is never 0. A hash has the same key in every process, because sampling must
  // not depend on a secret.
  static uint32_t key_of(const Hash& hash, uint8_t group) {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return std::max(static_cast<uint32_t>((word + group) * 0x9E3779B97F4A7C15 >> 32), 1U);
  }
  static int64_t age_of(const Record& record, int64_t now) {  // in ms
    return int64_t{(ticks_of(now) - record.time) & kTicks} * kMsPerTick;
  }
  // Returns the youngest record of a block; null if there is none.
  const Record* find(uint32_t key) const {
    const uint32_t i = records_.find(key);
    return i == 0 ? nullptr : &records_[i];
  }
  // Records the use of a block. Returns whether the block has a record.
  bool use(uint32_t key, int64_t now) {
    const uint32_t i = records_.find(key);
    if (i == 0) return false;
    Record& record = records_[i];
    if (record.bucket == kUnused) record.bucket = bucket_of(age_of(record, now)) & kUnused;
    return true;
  }
  // `weight`: quarters of the blocks that the sample stands for.
  void add(uint32_t key, int reuse_class, bool is_end, int64_t weight, int64_t now) {
    const auto i = static_cast<uint32_t>(num_added_ % learned::kRecords + 1);
    if (num_added_++ >= learned::kRecords) records_.unlink(i);
    // The earlier record of the key is no longer found. Otherwise, records of a key that is
    // released often would form a long list.
    if (const uint32_t before = records_.find(key)) records_.unlink(before);
    Record record{};
    record.key = key;
    record.time = ticks_of(now);
    record.reuse_class = static_cast<uint32_t>(reuse_class) & 0x7F;
    record.weight = static_cast<uint8_t>(std::clamp<int64_t>(weight, 1, UINT8_MAX));
    record.bucket = kUnused;
    record.is_end = is_end;
    records_.link(i, record);
  }
  // Recounts if there are enough new samples.
  void learn(int64_t now) {
    if (num_added_ - num_counted_ < std::max<int64_t>(num_records() / learned::kRecount, 64))
      return;
    num_counted_ = num_added_;
    solve(now);
  }

  double value(int reuse_class, int64_t age) const {
    const int b = bucket_of(age);
    if (!is_solved_[reuse_class]) solve_index(reuse_class);
    const auto& row = index_[reuse_class];
    const double share =
        (static_cast<double>(std::max<int64_t>(age, 0)) - begin_[b]) / (begin_[b + 1] - begin_[b]);
    return row[b] + std::min(share, 1.0) * (row[b + 1] - row[b]);
  }
  // Returns the expected number of hits of a block, minus `price` for each millisecond until the
  // best stopping age.
  double gain(int reuse_class, int64_t age, double price) const {
    double alive = 1, gain = 0, best = 0;
    for (int b = bucket_of(age); b < kBuckets; ++b) {
      const double h = hazard_[reuse_class][b];
      gain += alive * (h - price * (begin_[b + 1] - begin_[b]) * (1 - h / 2));
      alive *= 1 - h;
      best = std::max(best, gain);
    }
    return best;
  }
  size_t num_bytes() const { return sizeof(*this) + records_.num_bytes(); }

 private:
  static constexpr uint8_t kUnused = 127;
  static constexpr uint32_t kTicks = (1 << 25) - 1;
  static constexpr int64_t kMsPerTick = 64;
  static constexpr float kWeightOfSegment = 4 * 16;  // quarters of 16 blocks: see constants.h
  // Rows of counts and hazards: one per class, one per group of classes, and one for all classes.
  static constexpr int kNum = ReuseClass::kNum, kAllRow = kNum + ReuseClass::kGroups;
  static constexpr int kNumRows = kAllRow + 1;
  static constexpr int row_of_group(int group) { return kNum + group; }
  using Row = std::array<float, kBuckets>;
  using Rates = std::array<double, kBuckets>;

  static uint32_t ticks_of(int64_t ms) { return static_cast<uint32_t>(ms / kMsPerTick) & kTicks; }
  int64_t num_records() const { return std::min<int64_t>(num_added_, learned::kRecords); }
  int bucket_of(int64_t age) const {
    const auto t = static_cast<double>(age);
    int b = 0;
    for (int half = 16; half > 0; half /= 2) {
      if (b + half < kBuckets && t >= begin_[b + half]) b += half;
    }
    return b;
  }
  // Estimates the hazards of all classes.
  void solve(int64_t now) {
    Counts counts;
    count_samples(now, &counts);
    for (int c = 0; c < kNum; ++c) add_to_groups(c, &counts);
    shrink(counts);
    is_solved_.fill(false);
  }
  // Sums of the weights of samples, by row and bucket.
  struct Counts {
    // First the samples that reached no later bucket; after their sum over buckets, all samples
    // that reached the bucket.
    std::array<Row, kNumRows> reached{};
    std::array<Row, kNumRows> used{};  // samples whose block was used within the bucket
  };
  // Counts each sample in the bucket at which it was used or, if it is unused, that of its age.
  void count_samples(int64_t now, Counts* counts) const {
    for (int64_t i = 1; i <= num_records(); ++i) {
      const Record& each = records_[i];
      const bool is_used = each.bucket != kUnused;
      const int b = is_used ? each.bucket : bucket_of(age_of(each, now));
      const float weight = static_cast<float>(each.weight) / kWeightOfSegment;
      counts->reached[each.reuse_class][b] += weight;
      if (is_used) counts->used[each.reuse_class][b] += weight;
    }
    for (int c = 0; c < kNum; ++c) {
      Row& reached = counts->reached[c];
      for (int b = kBuckets - 2; b >= 0; --b) reached[b] += reached[b + 1];
    }
  }
  // Adds the counts of a class to those of its groups and to those of all classes.
  static void add_to_groups(int c, Counts* counts) {
    if (ReuseClass::is_loose(c)) return;  // says nothing about chains
    const auto add_to = [&](int row) {
      for (int b = 0; b < kBuckets; ++b) {
        counts->reached[row][b] += counts->reached[c][b];
        counts->used[row][b] += counts->used[c][b];
      }
    };
    const auto groups = ReuseClass::groups(c);
    for (int g = 0; g < groups.num; ++g) add_to(row_of_group(groups.all[g]));
    add_to(kAllRow);
  }
  // Sets the hazards to the observed rates, each shrunk towards its prior. The prior of a group is
  // the overall rate. The prior of a class treats its features as independent: it is the overall
  // rate times, for each feature, the ratio of the group's rate to the overall rate.
  void shrink(const Counts& counts) {
    Rates constant;
    constant.fill(learned::kPrior);
    const Rates overall = shrink_row(counts, kAllRow, learned::kAllWeight, constant);
    for (int g = 0; g < ReuseClass::kGroups; ++g) {
      shrink_row(counts, row_of_group(g), learned::kGroupWeight, overall);
    }
    for (int c = 0; c < kNum; ++c) {
      Rates prior = overall;
      const auto groups = ReuseClass::groups(c);
      for (int g = 0; g < groups.num; ++g) {
        const Row& of_group = hazard_[row_of_group(groups.all[g])];
        for (int b = 0; b < kBuckets; ++b) prior[b] *= of_group[b] / overall[b];
      }
      for (double& each : prior) each = std::min(each, .98);
      shrink_row(counts, c, learned::kClassWeight, prior);
    }
  }
  Rates shrink_row(const Counts& counts, int row, double weight, const Rates& prior) {
    Rates rates;
    for (int b = 0; b < kBuckets; ++b) {
      rates[b] = mean(counts.used[row][b], counts.reached[row][b], weight, prior[b]);
      hazard_[row][b] = static_cast<float>(rates[b]);
    }
    return rates;
  }
  static double mean(double used, double reached, double weight, double prior) {
    return std::min((used + weight * prior) / (reached + weight), 1.0);
  }
  // Computes the indices of a class. Most classes are rarely asked for.
  void solve_index(int reuse_class) const {
    is_solved_[reuse_class] = true;
    for (int first = 0; first < kBuckets; ++first) {
      double alive = 1, hits = 0, held_ms = 0, best = 0;  // per block that reaches `first`
      for (int b = first; b < kBuckets; ++b) {
        hits += alive * hazard_[reuse_class][b];
        // A block that is used in the bucket is kept for half of it on average.
        held_ms += alive * (begin_[b + 1] - begin_[b]) * (1 - hazard_[reuse_class][b] / 2);
        alive *= 1 - hazard_[reuse_class][b];
        best = std::max(best, hits / held_ms);
      }
      index_[reuse_class][first] = static_cast<float>(best);
    }
    // `value` interpolates between the starts of two buckets.
    index_[reuse_class][kBuckets] = index_[reuse_class][kBuckets - 1];
  }

  std::array<double, kBuckets + 1> begin_;  // ms
  std::array<Row, kNumRows> hazard_{};
  mutable std::array<std::array<float, kBuckets + 1>, kNum> index_{};
  mutable std::array<bool, kNum> is_solved_{};
  KeyedArray<Record> records_;  // a ring
  int64_t num_added_ = 0, num_counted_ = 0;
};

}  // namespace kvcache
