// Long work in pieces, between which whoever embeds the library may stop it.
#pragma once

#include <cstdint>

namespace kvcache {

// Called between pieces of work that changes nothing that others see; may throw. Null: nothing is.
inline void (*between_pieces)() = nullptr;

// Tokens hashed in a piece: some milliseconds.
constexpr int64_t kTokensPerPiece = int64_t{1} << 16;

// Counts tokens of long work, and ends a piece where there were enough.
class Pieces {
 public:
  void pass(int64_t num_tokens) {
    num_tokens_ += num_tokens;
    if (num_tokens_ < kTokensPerPiece) return;
    num_tokens_ = 0;
    if (between_pieces != nullptr) between_pieces();
  }

 private:
  int64_t num_tokens_ = 0;
};

}  // namespace kvcache
