// SPDX-License-Identifier: Apache-2.0
// Classes of released blocks with different reuse statistics.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcache {

// The blocks of a single conversation are classified by the caller's request class, the turn, the
// tokens that the turn added, and the answer length. Blocks shared by several conversations are
// classified by the number of observed forks. Blocks without a reported release have a separate
// class.
class ReuseClass {
 public:
  static constexpr int kTurns = 4, kAdded = 3, kAnswers = 2, kForks = 4;
  static constexpr int kRequests = 4;  // no request class, class 0, class 1, and all other classes
  static constexpr int kOfRequest = kTurns * kAdded * kAnswers;
  static constexpr int kOwn = kRequests * kOfRequest;
  static constexpr int kLoose = kOwn + kForks;
  static constexpr int kNum = kLoose + 1;  // counted classes
  static constexpr int kLoaded = kNum;     // copies of blocks that are also in the other tier

  static int of_own(int64_t turn, int64_t num_added_tokens, int64_t num_output_tokens,
                    int64_t request_class) {
    const int added = (num_added_tokens >= 2'560) + (num_added_tokens >= 20'480);
    const auto t = static_cast<int>(std::min<int64_t>(turn, kTurns - 1));
    const auto request = static_cast<int>(std::clamp<int64_t>(request_class + 1, 0, kRequests - 1));
    return request * kOfRequest + (t * kAdded + added) * kAnswers + (num_output_tokens >= 64);
  }
  static int of_shared(int num_forks) {
    return kOwn + (num_forks >= 2) + (num_forks >= 4) + (num_forks >= 16);
  }
  static bool is_shared(int reuse_class) { return reuse_class >= kOwn && reuse_class < kLoose; }
};

}  // namespace kvcache
