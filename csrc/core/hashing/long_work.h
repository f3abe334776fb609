// Long work in pieces, between which whoever embeds the library may stop it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace kvcache {

// Called between pieces of work that changes nothing that others see; may throw. Null: nothing is.
// `is_long`: other threads have waited for some milliseconds.
inline void (*between_pieces)(bool is_long) = nullptr;

// Tokens hashed in a piece: a part of a millisecond, or some.
constexpr int64_t kTokensPerPiece = int64_t{1} << 16;
constexpr std::chrono::milliseconds kLong{5};

// Counts tokens of long work, and ends a piece where there were enough.
class Pieces {
 public:
  void pass(int64_t num_tokens) {
    num_tokens_ += num_tokens;
    if (num_tokens_ < kTokensPerPiece) return;
    num_tokens_ = 0;
    if (between_pieces == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    const bool is_long = since_ && now - *since_ >= kLong;
    if (!since_ || is_long) since_ = now;
    between_pieces(is_long);
  }

 private:
  int64_t num_tokens_ = 0;
  std::optional<std::chrono::steady_clock::time_point> since_;  // the first piece, or the last call
};

}  // namespace kvcache
