// SPDX-License-Identifier: Apache-2.0
// Classes of released blocks with different reuse statistics.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvcache {

// The blocks of a single conversation are classified by the time since the previous turn, the
// tokens that the turn added, and the answer length. A short answer is often a tool call that
// returns soon, and a long one is often read by a person. Blocks shared by several conversations
// are classified by the number of observed forks. Two kinds of blocks each have a separate class:
// blocks that a conversation abandoned when it continued from an earlier point, and blocks whose
// release was not reported.
class ReuseClass {
 public:
  // Thresholds between the levels of each feature, in ascending order.
  static constexpr std::array<int64_t, 4> kGapLimits{12'000, 30'000, 120'000, 480'000};  // ms
  static constexpr std::array<int64_t, 2> kAddedLimits{2'560, 20'480};                   // tokens
  static constexpr std::array<int64_t, 3> kAnswerLimits{100, 300, 1'000};                // tokens
  static constexpr int kGaps = 6;  // first turns, and five levels of later turns
  static constexpr int kAdded = 3, kAnswers = 4, kForks = 4;
  static constexpr int kOwn = kGaps * kAdded * kAnswers;
  static constexpr int kLeft = kOwn + kForks;  // blocks left behind by a conversation
  static constexpr int kLoose = kLeft + 1;
  static constexpr int kLikely = kLoose + 1;  // a window or state, published for likely hits
  static constexpr int kHit = kLoose + 2;     // a window or state that was hit: once, twice, more
  static constexpr int kHits = 3;
  static constexpr int kNum = kHit + kHits;  // counted classes
  static constexpr int kLoaded = kNum;       // copies of blocks that are also in the other tier

  // `gap`: milliseconds since the previous turn was released; ignored for turn 0.
  static int of_own(int64_t turn, int64_t gap, int64_t num_added_tokens,
                    int64_t num_output_tokens) {
    const int g = turn == 0 ? 0 : 1 + level_of(gap, kGapLimits);
    return (g * kAdded + level_of(num_added_tokens, kAddedLimits)) * kAnswers +
           level_of(num_output_tokens, kAnswerLimits);
  }
  static int of_shared(int num_forks) {
    return kOwn + (num_forks >= 2) + (num_forks >= 4) + (num_forks >= 16);
  }
  static bool is_loose(int reuse_class) { return reuse_class >= kLoose && reuse_class < kNum; }
  // The class of a block that becomes idle without a reported release.
  static int idle(int reuse_class) { return is_loose(reuse_class) ? reuse_class : kLoose; }
  // The class of a window or state after a hit.
  static int hit(int reuse_class) {
    if (is_shared(reuse_class)) return kHit + 1;
    return reuse_class < kHit ? kHit : std::min(reuse_class + 1, kHit + kHits - 1);
  }
  static bool is_shared(int reuse_class) { return reuse_class >= kOwn && reuse_class < kLeft; }
  // The level of each feature, for a class of own blocks.
  static int answer_of(int reuse_class) { return reuse_class % kAnswers; }
  static int added_of(int reuse_class) { return reuse_class / kAnswers % kAdded; }
  static int gap_of(int reuse_class) { return reuse_class / (kAnswers * kAdded); }
  // Whether the blocks belong to a later turn of a single conversation.
  static bool is_later_turn(int reuse_class) {
    return reuse_class < kOwn && gap_of(reuse_class) > 0;
  }

 private:
  template <size_t kNumLimits>
  static int level_of(int64_t value, const std::array<int64_t, kNumLimits>& limits) {
    int level = 0;
    for (const int64_t limit : limits) level += value >= limit;
    return level;
  }
};

}  // namespace kvcache
