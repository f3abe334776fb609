// SPDX-License-Identifier: Apache-2.0
// Every token attends to all earlier tokens.
#pragma once

#include "core/groups/attention_kind.h"

namespace kvcache {

class FullAttention final : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t) const override { return 0; }
  bool keeps_all() const override { return true; }
};

}  // namespace kvcache
