// A token reads itself and the window - 1 tokens before it, out of a buffer that is written round.
//
// A request has the buffer's blocks for good: the token at position p takes the place of the one a
// whole number of buffers before. So nothing of it can be hit.
#pragma once

#include <algorithm>

#include "core/groups/attention_kind.h"
#include "core/limits.h"

namespace kvcache {

class CircularWindow final : public AttentionKind {
 public:
  CircularWindow(int64_t window, int64_t buffer)
      : window_(checked_size("window", window, 1)),
        buffer_(checked_size("buffer", buffer, window_, " (the window)")) {}

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return std::max<int64_t>(num_computed_tokens - window_ + 1, 0);
  }
  Pages pages() const override { return Pages::kCircular; }
  int64_t buffer() const override { return buffer_; }

 private:
  int64_t window_, buffer_;  // tokens
};

}  // namespace kvcache
