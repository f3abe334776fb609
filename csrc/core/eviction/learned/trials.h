// SPDX-License-Identifier: Apache-2.0
// Decides when a policy follows LRU, and when it tries its own order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcache {

// Let C be the capacity of the cache in blocks. In a trial, the policy uses its own order. The
// trial fails when the policy has lost D hits to LRU since it was furthest ahead, where D is M plus
// its lead at that point, but at least M and at most C. The policy then follows LRU until two
// conditions are met: at least 2 C * 2^L uses have passed since a failure at level L, and a
// simulated cache with the policy's own order has gained E hits over LRU since it was furthest
// behind.
//
// The level starts at 0. Each failed trial raises it by one. Each gain of 2 C hits over LRU since
// the last change of the level lowers it by one. A failure at level 0 costs little, so little
// evidence is required to try again:
//
//   level            0        1       2 and higher
//   M                C / 128  C / 4   C / 4
//   E                         C / 16  C / 4
//
// Bound: after n uses, the policy has at most 1.25 C (2 + log2(1 + n / (2 C))) hits fewer than LRU,
// whatever the simulated cache hits. Proof and assumptions: docs/eviction.md.
class Trials {
 public:
  explicit Trials(int64_t capacity) : capacity_(capacity) {}

  bool follows_lru() const { return follows_lru_; }
  // Records `num_used` uses. `gain`: hits of the policy minus hits of LRU. `gain_of_own`: the same
  // for a cache with the policy's own order; it matters only while the policy follows LRU.
  void count(int64_t num_used, int64_t gain, int64_t gain_of_own) {
    if (follows_lru_) {
      // The return to LRU loses at most C hits. All other differences are errors of the simulation.
      lead_ = std::clamp(lead_ + gain, lead_at_failure_ - capacity_, lead_at_failure_);
      num_left_ = std::max<int64_t>(num_left_ - num_used, 0);
      evidence_ = std::max<int64_t>(evidence_ + gain_of_own, 0);
      if (num_left_ == 0 && evidence_ >= part(level_ == 1 ? 16 : 4)) begin();
      return;
    }
    lead_ += gain;
    gain_ += gain;
    deficit_ = std::max<int64_t>(deficit_ - gain, 0);
    const int64_t most = part(level_ == 0 ? 128 : 4);
    // lead_ + deficit_ is the lead when the policy was furthest ahead.
    if (deficit_ >= std::clamp(most + lead_ + deficit_, most, capacity_)) {
      fail();
    } else if (gain_ >= 2 * capacity_) {
      level_ = std::max(level_ - 1, 0);
      gain_ = 0;
    }
  }

 private:
  static constexpr int kMostLevel = 30;

  int64_t part(int64_t of) const { return std::max<int64_t>(capacity_ / of, 1); }
  void begin() {
    follows_lru_ = false;
    deficit_ = gain_ = 0;
  }
  void fail() {
    follows_lru_ = true;
    num_left_ = 2 * capacity_ << level_;
    level_ = std::min(level_ + 1, kMostLevel);
    evidence_ = 0;
    lead_at_failure_ = lead_;
  }

  int64_t capacity_;
  bool follows_lru_ = false;
  int64_t lead_ = 0;  // hits gained over LRU
  int64_t lead_at_failure_ = 0;
  int64_t gain_ = 0;      // hits gained over LRU since the last change of the level
  int64_t deficit_ = 0;   // hits lost to LRU since the policy was furthest ahead
  int64_t evidence_ = 0;  // hits that the policy's own order gained since it was furthest behind
  int64_t num_left_ = 0;  // least number of uses for which the policy must still follow LRU
  int level_ = 0;
};

}  // namespace kvcache
