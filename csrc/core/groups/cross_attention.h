// SPDX-License-Identifier: Apache-2.0
// Every token attends to all encoder tokens. No other request can use the encoder's KV.
#pragma once

#include "core/groups/attention_kind.h"
#include "core/groups/rules/encoder.h"

namespace kvcache {

class CrossAttention final : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t) const override { return 0; }
  bool keeps_all() const override { return true; }
  const PageRules& rules() const override { return kEncoderRules; }
};

}  // namespace kvcache
