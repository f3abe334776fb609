// SPDX-License-Identifier: Apache-2.0
// Where prefix hits can end. Lookups, the ends of steps, and the blocks that stay cached depend on
// these positions, so all of them are computed here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/groups/rules/page_rules.h"
#include "core/hashing/token_chain.h"

namespace kvcache {

// There are two kinds of hits: those that may end inside blocks (`with_partial`), and those of
// whole blocks.
class HitEnds {
 public:
  explicit HitEnds(const std::vector<CacheGroup>& groups) : keeps_any_(has_chains(groups)) {
    for (const CacheGroup& group : groups) {
      keeps_all_ &= group.keeps_all;
    }
    for (const CacheGroup& group : groups) {
      const PageTraits& traits = group.rules->traits;
      if (!traits.has_hits) continue;
      partial_.unit = group.hit_unit;
      whole_.unit = checked_size("the least common multiple of the groups' block sizes",
                                 std::lcm(whole_.unit, group.block_size), 1);
      if (!traits.appends) state_unit_ = std::lcm(state_unit_, group.block_size);
      has_states_ |= !traits.appends;
      for (Kind* kind : {&partial_, &whole_}) {
        const int64_t redone = group.num_redone(/*with_partial=*/kind == &partial_);
        kind->num_redone = std::max(kind->num_redone, redone);
        if (limits_shared(group)) {
          kind->num_redone_shared = std::max(kind->num_redone_shared, redone);
        }
      }
    }
  }

  // Hits end at multiples of this number of tokens.
  int64_t unit(bool with_partial) const { return kind(with_partial).unit; }
  // Whether the group limits the shared prefix (`PrefixHit::num_shared_tokens`).
  bool limits_shared(const CacheGroup& group) const {
    return keeps_any_ ? group.keeps_all : group.rules->traits.appends;
  }

  // Returns the end of the longest hit of num_tokens tokens if all of their blocks are cached. The
  // last token is always computed, and the first num_hashed tokens are in blocks with known hashes.
  // `only_shared`: the hit of the groups that limit the shared prefix.
  int64_t longest(int64_t num_tokens, int64_t num_hashed, bool with_partial,
                  bool only_shared = false) const {
    const Kind& ends = kind(with_partial);
    const int64_t redone = only_shared ? ends.num_redone_shared : ends.num_redone;
    const int64_t most = std::min(num_tokens - 1, num_hashed - redone);
    return std::max<int64_t>(most, 0) / ends.unit * ends.unit;
  }
  // Returns the end of the longest hit of a prompt that equals the first num_tokens tokens.
  int64_t of_prompt(const TokenChain& chain, int64_t num_tokens, bool with_partial) const {
    return longest(num_tokens, chain.num_hashable(num_tokens) * chain.block_size(), with_partial);
  }

  // Returns the ends of the hits that are retained for a request, in addition to the multiples of
  // the retention interval. Without an interval, these are the likely hits about which the eviction
  // policy is notified. An equal prompt hits all but its last tokens. Another request with the same
  // first num_shared tokens hits those tokens; with a drafter, it hits fewer of them if the next
  // tokens differ. If the request itself has hit the shared tokens, nothing more is retained for
  // them.
  RetainedEnds retained(const TokenChain& chain, int64_t num_prompt, int64_t num_hit,
                        int64_t num_shared) const {
    RetainedEnds ends{};
    if (keeps_all_) return ends;
    size_t n = 0;
    for (const bool with_partial : {true, false}) {
      const Kind& of = kind(with_partial);
      ends[n++] = of_prompt(chain, num_prompt, with_partial);
      if (num_shared <= num_hit) continue;
      ends[n++] = num_shared / of.unit * of.unit;
      ends[n++] = std::max<int64_t>(num_shared - of.num_redone, 0) / of.unit * of.unit;
    }
    return ends;
  }

  // The tokens [start, stop) of a request, which the next step may compute.
  struct Next {
    int64_t start, stop;
    bool with_partial;
  };
  // Returns the end of the next step, so that later requests can hit the states there: the first of
  // `likely` that the step can reach or, if there is none, the last block boundary of the states.
  // Returns `stop` if the step reaches none of these ends or if there are no states.
  int64_t end_of_step(const Next& next, std::initializer_list<int64_t> likely) const {
    if (!has_states_) return next.stop;
    const int64_t boundary = std::lcm(unit(next.with_partial), state_unit_);
    int64_t first = kUnbounded;
    for (int64_t end : likely) {
      if (end > next.start) first = std::min(first, end);
    }
    if (first > next.stop) first = next.stop / boundary * boundary;
    return first > next.start ? first : next.stop;
  }

 private:
  struct Kind {
    int64_t unit = 1, num_redone = 0, num_redone_shared = 0;  // tokens
  };
  const Kind& kind(bool with_partial) const { return with_partial ? partial_ : whole_; }

  Kind partial_, whole_;
  bool keeps_any_, keeps_all_ = true, has_states_ = false;
  int64_t state_unit_ = 1;  // tokens; the common block boundaries of all states
};

}  // namespace kvcache
