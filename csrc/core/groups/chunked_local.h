// SPDX-License-Identifier: Apache-2.0
// Each token attends to the earlier tokens in its own chunk of the sequence.
#pragma once

#include "core/errors.h"
#include "core/groups/attention_kind.h"

namespace kvcache {

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

}  // namespace kvcache
