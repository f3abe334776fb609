// SPDX-License-Identifier: Apache-2.0
// The attention kinds. They differ in the first token that a step still reads, and in the content
// of their pages (core/groups/rules).
#pragma once

#include <algorithm>

#include "core/errors.h"
#include "core/groups/attention_kind.h"
#include "core/groups/rules/circular.h"
#include "core/groups/rules/encoder.h"
#include "core/groups/rules/state.h"

namespace kvcache {

// Every token attends to all earlier tokens.
class FullAttention final : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t) const override { return 0; }
  bool keeps_all() const override { return true; }
};

// Each token attends to itself and the window - 1 tokens before it.
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

// Each token attends to the earlier tokens in its own chunk of the sequence.
class ChunkedLocal final : public AttentionKind {
 public:
  explicit ChunkedLocal(int64_t chunk_size)
      : chunk_size_(checked_size("chunk_size", chunk_size, 1)) {}

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return num_computed_tokens / chunk_size_ * chunk_size_;
  }

 private:
  int64_t chunk_size_;  // tokens
};

// A sliding window whose KV is stored in a circular buffer. A request keeps the blocks of the
// buffer until it ends. Each token overwrites the token one buffer length before it, so blocks of
// the buffer are never hit.
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

// Every token attends to all encoder tokens. No other request can use the encoder's KV.
class CrossAttention final : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t) const override { return 0; }
  bool keeps_all() const override { return true; }
  const PageRules& rules() const override { return kEncoderRules; }
};

// Each token reads the state after the previous token (Mamba, linear attention).
class RecurrentState final : public AttentionKind {
 public:
  explicit RecurrentState(int64_t num_speculative_blocks = 0)
      : num_speculative_blocks_(checked_size("num_speculative_blocks", num_speculative_blocks, 0)) {
  }

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return std::max<int64_t>(num_computed_tokens - 1, 0);
  }
  bool is_retained_by_interval() const override { return true; }
  const PageRules& rules() const override { return kStateRules; }
  int64_t num_speculative_blocks() const override { return num_speculative_blocks_; }

 private:
  int64_t num_speculative_blocks_;
};

}  // namespace kvcache
