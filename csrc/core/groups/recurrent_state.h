// SPDX-License-Identifier: Apache-2.0
// Each token reads the state after the previous token (Mamba, linear attention).
//
// A step updates the state in place, in the page of the block that contains its last token. If the
// step enters another block, the plan first copies the state to the new page. The old page contains
// the state at the block boundary, and can be hit, only if a step ended exactly there. A state
// inside a block can be hit if a step of the prompt ended at a hash boundary. In that case, the
// next step also continues in another page.
//
// With n speculative blocks, n spare pages follow the page that contains a row's state. A step
// writes the state after its i-th draft to the i-th of these pages. If drafts are rejected, the row
// continues from the page of the last accepted draft. The pages swap places, and no state is
// copied.
#pragma once

#include <algorithm>

#include "core/errors.h"
#include "core/groups/attention_kind.h"
#include "core/groups/rules/state.h"

namespace kvcache {

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
