// SPDX-License-Identifier: Apache-2.0
// Limits how many hits a policy may lose compared with LRU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/eviction/learned/shadow_lru.h"

namespace kvcache {

// Counts the hits of the pool and the hits that it would have had with LRU. Let C be the number of
// simulated blocks that an LRU cache of this size holds. The policy may lose C / 4 hits plus
// its lead over LRU, but no more than C. It must then evict the oldest segment first, like LRU,
// for the next 2 C uses. Each further loss of this size doubles the period, and each gain of 2 C
// hits over LRU since the last change halves it.
//
// By default, the guard simulates a sample of the blocks, and counts each use of a block. If a hit
// needs more than a chain of device blocks, `compare_requests` makes it simulate all blocks and the
// host tier. The caller then determines the hits of each request.
//
// Bound for a sample: after n uses of sampled blocks, the pool has at most
// 1.25 C (2 + log2(1 + n / (2 C))) hits fewer than LRU. Proof and assumptions: docs/eviction.md.
class LruGuard {
 public:
  explicit LruGuard(int64_t num_blocks)
      : LruGuard(num_blocks, std::max<int64_t>((num_blocks - 1) / kMostSampled, 1)) {}

  void compare_requests(int64_t num_blocks, int64_t num_host_blocks) {
    compares_requests_ = true;
    last_sampled_ = UINT32_MAX;
    if (num_host_blocks > 0) {
      host_ = std::make_unique<ShadowLru>(std::max<int64_t>(num_host_blocks - 1, 1));
    }
    shadow_ = ShadowLru(std::max<int64_t>(num_blocks - 1, 1), host_.get());
  }
  bool compares_requests() const { return compares_requests_; }

  // Whether the policy must evict the oldest segment first.
  bool falls_back() const { return num_left_ > 0; }
  // Records that a request uses a block and holds it from now on. `is_hit`: whether the pool had
  // cached the block. This call and the calls below have no effect for blocks that are not sampled.
  void note_use(uint32_t key, bool is_hit) {
    if (!is_sampled(key)) return;
    const bool is_hit_of_lru = shadow_.hold(key);
    if (!compares_requests_) return count(1, int64_t{is_hit} - int64_t{is_hit_of_lru});
    if (!is_hit_of_lru && host_ != nullptr && host_->contains(key)) host_->touch(key);  // loaded
  }
  // The following three calls require `compare_requests`. `note_request` records that a request
  // uses `num_used` blocks and hits `gain` blocks more than with LRU. `note_end` records that, with
  // LRU, the request would use this window block or state.
  void note_request(int64_t num_used, int64_t gain) { count(num_used, gain); }
  void note_end(uint32_t key) {
    if (has(key, /*on_host=*/true)) shadow_.touch(key);
  }
  bool has(uint32_t key, bool on_host) const {
    return shadow_.contains(key) || (on_host && host_ != nullptr && host_->contains(key));
  }
  bool has_host() const { return host_ != nullptr; }
  // Records that no request holds the block any more. Must be called in the order in which LRU
  // would evict the blocks.
  void note_release(uint32_t key) {
    if (is_sampled(key)) shadow_.release(key);
  }
  // Records that a block has lost its hash for a reason other than eviction.
  void forget(uint32_t key) {
    if (is_sampled(key)) shadow_.remove(key);
  }
  void clear() { shadow_.clear(); }  // the device caches nothing
  void clear_host() {
    if (host_ != nullptr) host_->clear();
  }
  size_t num_bytes() const {
    return shadow_.num_bytes() + (host_ == nullptr ? 0 : host_->num_bytes());
  }

 private:
  static constexpr int64_t kMostSampled = 4'096;  // the sample has fewer than twice this number
  static constexpr int kMostLevel = 30;

  LruGuard(int64_t num_blocks, int64_t one_of)  // samples one of `one_of` blocks
      : last_sampled_(static_cast<uint32_t>(UINT32_MAX / one_of)),
        shadow_(std::max<int64_t>((num_blocks - 1) / one_of, 1)) {}
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }

  void count(int64_t num_used, int64_t gain) {
    lead_ += gain;
    if (falls_back()) {
      num_left_ -= num_used;
      return;
    }
    gain_ += gain;
    deficit_ = std::max<int64_t>(deficit_ - gain, 0);
    const int64_t capacity = shadow_.capacity();
    const int64_t most = std::max<int64_t>(capacity / 4, 1);
    // lead_ + deficit_ is the lead when the policy was furthest ahead.
    if (deficit_ >= std::clamp(most + lead_ + deficit_, most, capacity)) {
      num_left_ = 2 * capacity << level_;
      level_ = std::min(level_ + 1, kMostLevel);
      deficit_ = gain_ = 0;
    } else if (gain_ >= 2 * capacity) {
      level_ = std::max(level_ - 1, 0);
      gain_ = 0;
    }
  }

  bool compares_requests_ = false;
  uint32_t last_sampled_;            // keys up to this one are sampled
  std::unique_ptr<ShadowLru> host_;  // receives what `shadow_` evicts; null: none
  ShadowLru shadow_;
  int64_t lead_ = 0;      // hits gained over LRU
  int64_t gain_ = 0;      // hits gained over LRU since the last change of the level
  int64_t deficit_ = 0;   // hits lost to LRU since the policy was furthest ahead
  int64_t num_left_ = 0;  // number of uses for which the policy must still follow LRU
  int level_ = 0;
};

}  // namespace kvcache
