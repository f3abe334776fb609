// SPDX-License-Identifier: Apache-2.0
// Chooses the positions at which the steps of a prompt end, so that later requests can hit the
// states there.
//
// Invariant: all calls are read-only.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"

namespace kvcache {

class Checkpoints {
 public:
  struct Prompt {
    int64_t num_computed;  // computed tokens, including hits
    int64_t num_tokens;
    int64_t num_shared;  // tokens that all groups without states would hit
    bool is_cached;      // whether its blocks may become hits
  };

  // `unit`: hits end at multiples of this number of tokens.
  Checkpoints(const std::vector<CacheGroup>& groups, int64_t unit, int64_t hash_block_size);

  // Returns how many of the next num_tokens tokens to compute. The step ends at the first of these
  // positions that it can reach: the end of the shared tokens, the last position where the hit of
  // an equal prompt can end, or the last block boundary of the states. It includes all tokens if it
  // reaches none of these positions or if no states are kept.
  int64_t num_tokens_to_next(const Prompt& prompt, int64_t num_tokens) const;

 private:
  // Returns the end of the longest hit for a repeated prompt of num_tokens tokens.
  int64_t last_hit(int64_t num_tokens) const;

  bool has_states_ = false;
  int64_t unit_, hash_block_size_;  // tokens
  int64_t num_redone_ = 0;          // tokens after a hit that a drafting group must also find
  int64_t interval_ = 1;  // tokens; states of all groups can be kept at multiples of this number
};

}  // namespace kvcache
