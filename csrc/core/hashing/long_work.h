// SPDX-License-Identifier: Apache-2.0
// Splits long computations into pieces, so that the application can interrupt them between pieces.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kvcache {

// Called between pieces of work whose effects are not visible yet. May throw. Null disables the
// calls. `is_long`: other threads have been waiting for several milliseconds.
inline void (*between_pieces)(bool is_long) = nullptr;

// The number of tokens hashed per piece. Each piece takes at most a few milliseconds. Tests use
// pieces of one block.
inline int64_t tokens_per_piece = int64_t{1} << 16;
constexpr std::chrono::milliseconds kLong{5};

// The number of consecutive blocks to hash between two calls of `Pieces::pass`.
inline constexpr int64_t kMostBlocksPerRun = 64;
inline size_t blocks_per_run(int64_t block_size) {
  const int64_t fit = tokens_per_piece / block_size;
  return static_cast<size_t>(std::clamp<int64_t>(fit, 1, kMostBlocksPerRun));
}

// Counts processed tokens, and calls `between_pieces` whenever a piece is full.
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
  // The end of the first full piece, or of the last one that `between_pieces` was told to be long.
  std::optional<std::chrono::steady_clock::time_point> since_;
};

}  // namespace kvcache
