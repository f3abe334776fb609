// SPDX-License-Identifier: Apache-2.0
// Limits how many hits a policy may lose compared with LRU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/eviction/learned/shadow_lru.h"

namespace kvcache {

// For a sample of blocks, counts the hits of the pool and the hits that it would have had with LRU.
// Let C be the number of sampled blocks that an LRU cache of this size holds. If the pool falls C
// hits behind LRU, the policy must evict the oldest segment first, like LRU, for the next C uses.
// This period doubles each time the pool falls behind again. It is halved whenever the policy has
// gained 2 C hits over LRU since the last change.
//
// Bound: after n uses of sampled blocks, the pool has at most 2 C (2 + log2(1 + n / C)) hits fewer
// than LRU. Proof and assumptions: docs/eviction.md.
class LruGuard {
 public:
  explicit LruGuard(int64_t num_blocks)
      : LruGuard(num_blocks, std::max<int64_t>((num_blocks - 1) / kMostSampled, 1)) {}

  // Whether the policy must evict the oldest segment first.
  bool falls_back() const { return num_left_ > 0; }
  // Records that a request uses a block and holds it from now on. `is_hit`: whether the pool had
  // cached the block. This call and the calls below have no effect for blocks that are not sampled.
  void note_use(uint32_t key, bool is_hit) {
    if (!is_sampled(key)) return;
    const bool is_hit_of_lru = shadow_.hold(key);
    if (falls_back()) {
      --num_left_;
      return;
    }
    const int64_t gain = int64_t{is_hit} - int64_t{is_hit_of_lru};
    gain_ += gain;
    deficit_ = std::max<int64_t>(deficit_ - gain, 0);
    const int64_t capacity = shadow_.capacity();
    if (deficit_ >= capacity) {
      num_left_ = capacity << level_;
      level_ = std::min(level_ + 1, kMostLevel);
      deficit_ = gain_ = 0;
    } else if (gain_ >= 2 * capacity) {
      level_ = std::max(level_ - 1, 0);
      gain_ = 0;
    }
  }
  // Records that no request holds the block any more. Must be called in the order in which LRU
  // would evict the blocks.
  void note_release(uint32_t key) {
    if (is_sampled(key)) shadow_.release(key);
  }
  // Records that a block has lost its hash for a reason other than eviction.
  void forget(uint32_t key) {
    if (is_sampled(key)) shadow_.remove(key);
  }
  void clear() { shadow_.clear(); }  // the pool caches nothing
  size_t num_bytes() const { return shadow_.num_bytes(); }

 private:
  static constexpr int64_t kMostSampled = 4'096;  // the shadow holds fewer than twice this number
  static constexpr int kMostLevel = 40;

  LruGuard(int64_t num_blocks, int64_t one_of)  // samples one of `one_of` blocks
      : last_sampled_(static_cast<uint32_t>(UINT32_MAX / one_of)),
        shadow_(std::max<int64_t>((num_blocks - 1) / one_of, 1)) {}
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }

  uint32_t last_sampled_;  // keys up to this one are sampled
  ShadowLru shadow_;
  int64_t gain_ = 0;      // hits gained over LRU since the last change of the level
  int64_t deficit_ = 0;   // hits lost to LRU since the policy was furthest ahead
  int64_t num_left_ = 0;  // number of uses for which the policy must still follow LRU
  int level_ = 0;
};

}  // namespace kvcache
