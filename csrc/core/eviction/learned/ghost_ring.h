// SPDX-License-Identifier: Apache-2.0
// Records of released blocks, including blocks that are no longer cached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/reuse_class.h"

namespace kvcache {

// The most recent records, indexed by block key. If two records have equal keys, a lookup returns
// the later record.
class GhostRing {
 public:
  static constexpr int kMostTurn = 3;    // higher turn numbers are recorded as this one
  static constexpr uint32_t kDone = 31;  // bucket of records that are not sampled or were used
  struct Record {
    uint32_t key;             // always even
    uint32_t time_lower = 0;  // lower and upper bits of the release time
    uint32_t time_upper : 14;
    uint32_t reuse_class : 9;
    uint32_t bucket : 5;     // age bucket reached so far; kDone: no longer counted
    uint32_t turn : 2;       // at most kMostTurn
    uint32_t is_sample : 1;  // whether the record is counted
    uint32_t is_end : 1;     // whether the block is the last of a request

    // Exact for times below 2**46 ms, which is more than 2,000 years.
    int64_t time() const { return int64_t{time_upper} << 32 | time_lower; }
    void set_time(int64_t time) {
      time_lower = static_cast<uint32_t>(time);
      time_upper = static_cast<uint32_t>(time >> 32) & 0x3FFF;
    }
  };
  static_assert(sizeof(Record) == 12 && ReuseClass::kNum <= 512 && AgeBuckets::kNum <= kDone);

  explicit GhostRing(int64_t num)  // a power of two, at most 32,768
      : records_(static_cast<size_t>(num)),
        heads_(static_cast<size_t>(num), kNone),
        next_(static_cast<size_t>(num)),
        num_unsampled_(static_cast<size_t>(kNumCounts)) {}

  bool is_full() const { return num_added_ >= num(); }
  // Whether an unsampled record of this key may exist. Usually there is none.
  bool may_have_unsampled(uint32_t key) const { return num_unsampled_[key / 2 % kNumCounts] != 0; }
  Record* find(uint32_t key) {
    for (uint16_t i = heads_[slot_of(key)]; i != kNone; i = next_[i]) {
      if (records_[i].key == key) return &records_[i];
    }
    return nullptr;
  }
  // Overwrites the oldest record if the ring is full. Lookups no longer find an earlier record with
  // the same key.
  void add(const Record& record) {
    unlink(record.key, kNone);
    const auto i = static_cast<uint16_t>(place_of(num_added_));
    if (is_full()) {
      unlink(records_[i].key, i);
      count(records_[i], -1);
    }
    records_[i] = record;
    count(record, 1);
    uint16_t& head = heads_[slot_of(record.key)];
    next_[i] = head;
    head = i;
    ++num_added_;
  }
  // Records are numbered from 0 in the order of the `add` calls. Records [first, num_added) still
  // exist.
  int64_t first() const { return std::max<int64_t>(num_added_ - num(), 0); }
  int64_t num_added() const { return num_added_; }
  Record& at(int64_t number) { return records_[place_of(number)]; }
  const Record& at(int64_t number) const { return records_[place_of(number)]; }
  size_t num_bytes() const {
    return records_.capacity() * sizeof(Record) +
           (heads_.capacity() + next_.capacity()) * sizeof(uint16_t) + num_unsampled_.capacity();
  }

 private:
  static constexpr uint16_t kNone = UINT16_MAX;
  // If half of 32,768 records are unsampled, one count in four is nonzero. With 16,384 counts, two
  // in three were nonzero, and a release took 6 ns longer per block.
  static constexpr uint32_t kNumCounts = 65'536;
  // A count that has reached this value is never decreased, because the true count may be higher.
  static constexpr uint8_t kMostCount = UINT8_MAX;

  size_t place_of(int64_t number) const {
    return static_cast<size_t>(number) & (records_.size() - 1);
  }
  void count(const Record& record, int change) {
    uint8_t& num = num_unsampled_[record.key / 2 % kNumCounts];
    if (!record.is_sample && num != kMostCount) num = static_cast<uint8_t>(num + change);
  }
  int64_t num() const { return static_cast<int64_t>(records_.size()); }
  size_t slot_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }
  // Unlinks the most recent record of this key, or the record at index `only` if it is given.
  void unlink(uint32_t key, uint16_t only) {
    for (uint16_t* i = &heads_[slot_of(key)]; *i != kNone; i = &next_[*i]) {
      if (only == kNone ? records_[*i].key != key : *i != only) continue;
      *i = next_[*i];
      return;
    }
  }

  std::vector<Record> records_;
  std::vector<uint16_t> heads_, next_;
  std::vector<uint8_t> num_unsampled_;  // number of unsampled records, by key
  int64_t num_added_ = 0;
};

}  // namespace kvcache
