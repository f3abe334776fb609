// Long computations in pieces, between which the embedding application may interrupt them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace kvcache {

// Called between pieces of work whose effects are not visible yet; may throw. Null: no calls.
// `is_long`: other threads have been waiting for milliseconds.
inline void (*between_pieces)(bool is_long) = nullptr;

// Tokens hashed per piece, in at most a few milliseconds. Tests use pieces of one block.
inline int64_t tokens_per_piece = int64_t{1} << 16;
constexpr std::chrono::milliseconds kLong{5};

// Counts processed tokens, and ends a piece when it has enough.
class Pieces {
 public:
  void pass(int64_t num_tokens) {
    num_tokens_ += num_tokens;
    if (num_tokens_ < tokens_per_piece) return;
    num_tokens_ = 0;
    if (between_pieces == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    const bool is_long = since_ && now - *since_ >= kLong;
    if (!since_ || is_long) since_ = now;
    between_pieces(is_long);
  }

 private:
  int64_t num_tokens_ = 0;
  std::optional<std::chrono::steady_clock::time_point> since_;  // first piece or last call
};

}  // namespace kvcache
