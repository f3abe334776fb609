// SPDX-License-Identifier: Apache-2.0
// A kind of attention, which determines which earlier tokens are still needed.
//
// first_needed_token determines which blocks can be dropped while a request runs, and which blocks
// must be found for a prefix hit.
#pragma once

#include <cstdint>

namespace kvcache {

class PageRules;

class AttentionKind {
 public:
  virtual ~AttentionKind() = default;

  // Returns the first token to which the token at `num_computed_tokens` or any later token attends.
  // The result must be between 0 and `num_computed_tokens`, and must not decrease as
  // `num_computed_tokens` grows.
  virtual int64_t first_needed_token(int64_t num_computed_tokens) const = 0;

  // Whether first_needed_token is always 0.
  virtual bool keeps_all() const { return false; }

  // Whether the retention interval limits which blocks stay cached. Otherwise, all blocks that a
  // hit can read stay cached.
  virtual bool is_retained_by_interval() const { return false; }

  // The page rules (core/groups/rules). The default is kTokenRules.
  virtual const PageRules& rules() const;

  // For states: the number of drafts per step that can be rejected. The state after each of these
  // drafts is stored in a separate page.
  virtual int64_t num_speculative_blocks() const { return 0; }

  // The maximum distance from the first token that a step reads to the last token that it writes;
  // 0: unlimited.
  virtual int64_t buffer() const { return 0; }
};

}  // namespace kvcache
