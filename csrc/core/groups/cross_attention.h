// Every token reads all tokens of the encoder, whose KV no other request can use.
#pragma once

#include "core/groups/attention_kind.h"

namespace kvcache {

class CrossAttention final : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t) const override { return 0; }
  bool keeps_all() const override { return true; }
  Pages pages() const override { return Pages::kEncoder; }
};

}  // namespace kvcache
