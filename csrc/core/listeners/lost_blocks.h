// SPDX-License-Identifier: Apache-2.0
// Remembers when and why blocks left the cache, for a sample of the blocks of one group.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "core/hash.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// Each manager has one object, which the pools of both tiers share. The hash table has a fixed
// size: a new record replaces the oldest one of its bucket.
class LostBlocks {
 public:
  static constexpr size_t kLeastRecords = 262'144;
  struct Loss {
    bool is_evicted;
    bool was_on_host;  // left the host tier, not the device
    Taker taker;       // purpose for which the block was evicted
    int64_t ms_ago;    // rounded to kMsPerUnit, modulo about 310 days
  };
  static constexpr int64_t kMsPerUnit = 100;

  // Samples one in `one_of` blocks of the group and keeps the latest records: four times as many as
  // a pool of num_blocks blocks has sampled blocks, and at least kLeastRecords. `view`: clock and
  // purpose of evictions.
  LostBlocks(int64_t num_blocks, int64_t one_of, uint8_t group, const PoolView* view)
      : view_(view),
        last_sampled_(static_cast<uint32_t>(UINT32_MAX / one_of)),
        group_(group),
        buckets_(num_buckets(num_blocks / one_of)) {}

  // Selects blocks by their hashes, so that all requests with the same block agree on whether it is
  // sampled.
  bool is_sampled(const Hash& hash) const { return is_sampled(mixed(hash)); }

  // Records that a block has left the cache, either evicted to make room or removed for another
  // reason.
  void note(const Hash& hash, uint8_t group, bool is_evicted, bool was_on_host) {
    const uint64_t mixed = LostBlocks::mixed(hash);
    if (is_sampled(mixed) && group == group_) add(mixed, is_evicted, was_on_host);
  }
  // Returns how a block left the cache. Empty if it never did, is not sampled, or its record was
  // replaced.
  std::optional<Loss> find(const Hash& hash) const {
    const uint64_t mixed = LostBlocks::mixed(hash);
    for (const Record& each : buckets_[index_of(mixed)]) {
      if (each.key != key_of(mixed)) continue;
      const uint32_t age = (now() - each.time) & kTimeMask;
      return Loss{each.is_evicted != 0, each.was_on_host != 0, static_cast<Taker>(each.taker),
                  kMsPerUnit * int64_t{age}};
    }
    return std::nullopt;
  }
  size_t num_bytes() const { return buckets_.size() * sizeof(Bucket); }

 private:
  static constexpr uint32_t kTimeMask = (uint32_t{1} << 28) - 1;
  struct Record {
    uint32_t key;  // 0: unused
    uint32_t time : 28, taker : 2, is_evicted : 1, was_on_host : 1;
  };
  static constexpr size_t kPerBucket = 8;
  struct alignas(64) Bucket : std::array<Record, kPerBucket> {};  // newest record first

  static uint64_t mixed(const Hash& hash) {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return word * 0x9E3779B97F4A7C15;
  }
  // The upper half selects the sample and identifies the block, the lower half selects the bucket.
  static uint32_t key_of(uint64_t mixed) {
    return std::max(static_cast<uint32_t>(mixed >> 32), uint32_t{1});
  }
  size_t index_of(uint64_t mixed) const { return mixed & (buckets_.size() - 1); }
  bool is_sampled(uint64_t mixed) const { return mixed >> 32 <= last_sampled_; }
  void add(uint64_t mixed, bool is_evicted, bool was_on_host) {
    Bucket& bucket = buckets_[index_of(mixed)];
    const uint32_t key = key_of(mixed);
    size_t i = 0;
    while (i + 1 < kPerBucket && bucket[i].key != key) ++i;
    std::copy_backward(bucket.begin(), bucket.begin() + i, bucket.begin() + i + 1);
    bucket[0] = {key, now() & kTimeMask, static_cast<uint32_t>(view_->taker), is_evicted,
                 was_on_host};
  }
  static size_t num_buckets(int64_t num_sampled) {
    size_t num = kLeastRecords / kPerBucket;
    while (num * kPerBucket < static_cast<size_t>(4 * num_sampled)) num *= 2;
    return num;
  }

  uint32_t now() const { return static_cast<uint32_t>(view_->clock.now_ms / kMsPerUnit); }

  const PoolView* view_;
  uint32_t last_sampled_;  // blocks whose upper half is at most this number are sampled
  uint8_t group_;
  std::vector<Bucket> buckets_;
};

// Records the blocks that leave the cache of one tier.
class LossRecorder : public BlockListener {
 public:
  LossRecorder(LostBlocks* lost, Tier tier) : lost_(lost), is_host_(tier == Tier::kHost) {}

  void on_forget(const Forgotten& forgotten) override {
    if (forgotten.why == Forgotten::Why::kFreed) return;
    for (int64_t i = 0; i < forgotten.n; ++i) {
      const Hash* hash = forgotten.hash(i);
      if (hash == nullptr) continue;
      lost_->note(*hash, forgotten.group(i), forgotten.why == Forgotten::Why::kEvicted, is_host_);
    }
  }

 private:
  LostBlocks* lost_;
  bool is_host_;
};

}  // namespace kvcache
