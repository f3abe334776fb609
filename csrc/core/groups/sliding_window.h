// SPDX-License-Identifier: Apache-2.0
// Each token attends to itself and the window - 1 tokens before it.
#pragma once

#include <algorithm>

#include "core/errors.h"
#include "core/groups/attention_kind.h"

namespace kvcache {

class SlidingWindow final : public AttentionKind {
 public:
  explicit SlidingWindow(int64_t window) : window_(checked_size("window", window, 1)) {}

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return std::max<int64_t>(num_computed_tokens - window_ + 1, 0);
  }
  bool is_retained_by_interval() const override { return true; }

 private:
  int64_t window_;  // tokens
};

}  // namespace kvcache
