// Where a step of a prompt ends so that the states it leaves are hit by later requests.
//
// Invariant: changes nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"

namespace kvcache {

class Checkpoints {
 public:
  struct Prompt {
    int64_t num_computed;  // tokens that are computed, or hit
    int64_t num_tokens;
    int64_t num_shared;  // tokens that all groups but the states would have hit
    bool is_cached;      // what it computes may be hit by others
  };

  // `unit`: tokens, hits end at multiples of it.
  Checkpoints(const std::vector<CacheGroup>& groups, int64_t unit, int64_t hash_block_size);

  // How many of the next num_tokens tokens to compute: up to the end of what is shared; else up to
  // the last place where an equal prompt's hit can end; else up to the last boundary of the states'
  // blocks; else, and where no states are kept, all.
  int64_t num_tokens_to_next(const Prompt& prompt, int64_t num_tokens) const;

 private:
  // Where the longest hit of a prompt ends that equals one of so many tokens.
  int64_t last_hit(int64_t num_tokens) const;

  bool has_states_ = false;
  int64_t unit_, hash_block_size_;  // tokens
  int64_t num_redone_ = 0;          // tokens behind a hit that a drafting group finds, too
  int64_t interval_ = 1;            // tokens: all groups' states can be kept at multiples of it
};

}  // namespace kvcache
