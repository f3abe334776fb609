// A token reads the state that the token before it left (Mamba, linear attention).
//
// A step updates the state in place, in the page of the block that its last token lies in; where
// that is another block than before, the plan copies the state there first. The page that is left
// behind holds the state at a block boundary only if a step ended there: then it can be hit.
// So can a state inside a block, where a step of the prompt ended at a hash boundary: then the next
// step goes on in another page, too.
//
// With speculative blocks a row has so many pages more behind that of its state: a step writes the
// state after its i-th draft into the i-th of them. When drafts are rejected, the row goes on from
// the page of the last one that was accepted; the pages change places, no state is copied.
#pragma once

#include <algorithm>

#include "core/groups/attention_kind.h"
#include "core/limits.h"

namespace kvcache {

class RecurrentState final : public AttentionKind {
 public:
  explicit RecurrentState(int64_t num_speculative_blocks = 0)
      : num_speculative_blocks_(checked_size("num_speculative_blocks", num_speculative_blocks, 0)) {
  }

  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    return std::max<int64_t>(num_computed_tokens - 1, 0);
  }
  Pages pages() const override { return Pages::kState; }
  int64_t num_speculative_blocks() const override { return num_speculative_blocks_; }

 private:
  int64_t num_speculative_blocks_;
};

}  // namespace kvcache
