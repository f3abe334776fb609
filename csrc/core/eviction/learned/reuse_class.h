// SPDX-License-Identifier: Apache-2.0
// Classes of released blocks with different reuse statistics.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/eviction/learned/constants.h"

namespace kvcache {

// The blocks of a single conversation are classified by the time since the previous turn, the
// tokens that the turn added, and the answer length. A short answer is often a tool call that
// returns soon, and a long one is often read by a person. Blocks shared by several conversations
// are classified by the number of observed forks.
class ReuseClass {
 public:
  static constexpr int kGaps = 6;  // first turns, and five levels of later turns
  static constexpr int kAddeds = 3, kAnswers = 4;
  static constexpr int kShared = kGaps * kAddeds * kAnswers;  // with 1, 2, 4 or 16 forks
  static constexpr int kLeft = kShared + 4;                   // left behind by a conversation
  static constexpr int kLoose = kLeft + 1;                    // not released by a request that ends
  static constexpr int kLikely = kLoose + 1;  // a window or state, published for likely hits
  static constexpr int kHit = kLikely + 1;    // a window or state that was hit: once, twice, more
  static constexpr int kNum = kHit + 3;       // classes with hazards
  static constexpr int kLoaded = kNum;        // copies of blocks that are also in the other tier
  // Groups of classes that share what they have learned: one per level of each feature of own
  // blocks, shared, left behind, loose.
  static constexpr int kGroups = kGaps + kAddeds + kAnswers + 3;

  // `gap`: milliseconds since the previous turn was released; ignored for turn 0.
  static int own(int turn, int64_t gap, int64_t num_added, int64_t num_answer) {
    using namespace learned;
    const int g = turn == 0 ? 0 : 1 + level_of(gap, kGap, kGapRatio, kGaps - 2);
    return (g * kAddeds + level_of(num_added, kAdded, kAddedRatio, kAddeds - 1)) * kAnswers +
           level_of(num_answer, kAnswer, kAnswerRatio, kAnswers - 1);
  }
  static int shared(int num_forks) {
    return kShared + (num_forks >= 2) + (num_forks >= 4) + (num_forks >= 16);
  }
  // The least number of forks of a class; 0: not shared.
  static int forks(int reuse_class) {
    return is_shared(reuse_class) ? 1 << (reuse_class - kShared) : 0;
  }
  static bool is_shared(int reuse_class) { return reuse_class >= kShared && reuse_class < kLeft; }
  static bool is_loose(int reuse_class) { return reuse_class >= kLoose && reuse_class < kNum; }
  // The class of a window or state after a hit.
  static int hit(int reuse_class) {
    if (is_shared(reuse_class)) return kHit + 1;
    return reuse_class < kHit ? kHit : std::min(reuse_class + 1, kNum - 1);
  }
  // The groups of a class: three for own blocks, one for others.
  struct Groups {
    std::array<int, 3> all;
    int num;
  };
  static Groups groups(int reuse_class) {
    if (reuse_class < kShared) {
      return {{reuse_class / (kAddeds * kAnswers), kGaps + reuse_class / kAnswers % kAddeds,
               kGaps + kAddeds + reuse_class % kAnswers},
              3};
    }
    return {{kGroups - 3 + (reuse_class >= kLeft) + (reuse_class >= kLoose)}, 1};
  }

 private:
  static int level_of(int64_t value, double limit, double ratio, int most) {
    int level = 0;
    for (; level < most && static_cast<double>(value) >= limit; limit *= ratio) ++level;
    return level;
  }
};

}  // namespace kvcache
