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
  Checkpoints(const std::vector<CacheGroup>& groups, int64_t unit);

  // How many of the next num_tokens tokens to compute: up to the end of what is shared; else up to
  // the last boundary of the states' blocks, or the last place inside the prompt where a hit can
  // end; else, and where no states are kept, all.
  int64_t num_tokens_to_next(const Prompt& prompt, int64_t num_tokens) const;

 private:
  bool has_states_ = false;
  int64_t unit_;          // tokens
  int64_t interval_ = 1;  // tokens: all groups' states can be kept at multiples of it
};

}  // namespace kvcache
