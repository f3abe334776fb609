// Kinds of released blocks that are reused by laws of their own.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcache {

// Own blocks of one conversation, by the caller's class of its request, its turn, the tokens that
// the turn added and the length of the answer; blocks that several conversations share, by how
// often their chain was seen to fork; and blocks of no release that the policy was told of.
class ReuseClass {
 public:
  static constexpr int kTurns = 4, kAdded = 3, kAnswers = 2, kForks = 4;
  static constexpr int kRequests = 4;  // none; the caller's 0, 1, and the others
  static constexpr int kOfRequest = kTurns * kAdded * kAnswers;
  static constexpr int kOwn = kRequests * kOfRequest;
  static constexpr int kLoose = kOwn + kForks;
  static constexpr int kNum = kLoose + 1;  // that are counted
  static constexpr int kLoaded = kNum;     // of copies whose blocks are in the other tier, too

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
