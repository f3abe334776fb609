// SPDX-License-Identifier: Apache-2.0
// Classes of released blocks with different reuse statistics.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "core/eviction/learned/constants.h"

namespace kvcache {

// The blocks of a single conversation are classified by the time since the previous turn, the
// tokens that the turn added, and the answer length. A short answer is often a tool call that
// returns soon, and a long one is often read by a person; a caller that knows replaces this guess.
// Blocks shared by several conversations
// are classified by the number of observed forks.
class ReuseClass {
 public:
  static constexpr int kGaps = 6;  // first turns, and five levels of later turns
  static constexpr int kAddeds = 3;
  static constexpr int kLengths = 4;             // of answers
  static constexpr int kAnswers = kLengths + 2;  // continued or final, if the caller knows which
  static constexpr int kShared = kGaps * kAddeds * kAnswers;  // with 1, 2, 4 or 16 forks
  static constexpr int kLoose = kShared + 4;                  // not released by a request that ends
  static constexpr int kLikely = kLoose + 1;  // a window or state, published for likely hits
  static constexpr int kHit = kLikely + 1;    // a window or state that was hit
  static constexpr int kNum = kHit + 1;       // classes with hazards
  static constexpr int kLoaded = kNum;        // copies of blocks that are also in the other tier
  // Groups of classes that share what they have learned: one per level of each feature of own
  // blocks, shared, loose.
  static constexpr int kGroups = kGaps + kAddeds + kAnswers + 2;

  // `gap`: milliseconds since the previous turn was released; negative: first turn.
  // `ends_turn`: replaces the length of the answer.
  static int own(int64_t gap, int64_t num_added, int64_t num_answer,
                 std::optional<bool> ends_turn) {
    using namespace learned;
    const int g = gap < 0 ? 0 : 1 + level_of(gap, kGap, kGapRatio, kGaps - 2);
    return (g * kAddeds + level_of(num_added, kAdded, kAddedRatio, kAddeds - 1)) * kAnswers +
           (ends_turn ? kLengths + *ends_turn
                      : level_of(num_answer, kAnswer, kAnswerRatio, kLengths - 1));
  }
  static int shared(int num_forks) {
    return kShared + (num_forks >= 2) + (num_forks >= 4) + (num_forks >= 16);
  }
  // The least number of forks of a class; 0: not shared.
  static int forks(int reuse_class) {
    return is_shared(reuse_class) ? 1 << (reuse_class - kShared) : 0;
  }
  static bool is_shared(int reuse_class) { return reuse_class >= kShared && reuse_class < kLoose; }
  static bool is_loose(int reuse_class) { return reuse_class >= kLoose && reuse_class < kNum; }
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
    return {{kGroups - 2 + is_loose(reuse_class)}, 1};
  }

 private:
  static int level_of(int64_t value, double limit, double ratio, int most) {
    int level = 0;
    for (; level < most && static_cast<double>(value) >= limit; limit *= ratio) ++level;
    return level;
  }
};

}  // namespace kvcache
