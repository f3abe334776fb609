// SPDX-License-Identifier: Apache-2.0
// Each token attends to itself and the window - 1 tokens before it. Their KV is stored in a
// circular buffer.
//
// A request keeps the blocks of the buffer until it ends. Each token overwrites the token one
// buffer length before it, so blocks of the buffer are never hit.
#pragma once

#include <algorithm>

#include "core/errors.h"
#include "core/groups/attention_kind.h"
#include "core/groups/rules/circular.h"

namespace kvcache {

class CircularWindow final : public AttentionKind {
 public:
  CircularWindow(int64_t window, int64_t buffer)
      : window_(checked_size("window", window, 1)),
        buffer_(checked_size("buffer", buffer, window_, " (the window)")) {}

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return std::max<int64_t>(num_computed_tokens - window_ + 1, 0);
  }
  const PageRules& rules() const override { return kCircularRules; }
  int64_t buffer() const override { return buffer_; }

 private:
  int64_t window_, buffer_;  // tokens
};

}  // namespace kvcache
