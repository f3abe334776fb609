// SPDX-License-Identifier: Apache-2.0
// The hits for which window blocks and states stay cached (`CacheOptions.retention_interval`).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"

namespace kvcache {

// Computes the ends of the hits that are retained for a request, in addition to the multiples of
// the retention interval. Without an interval, these are the likely hits about which the eviction
// policy is notified.
class RetainedHits {
 public:
  // `unit`, `whole_unit`: hits end at multiples of these numbers, see PrefixFinder.
  RetainedHits(const std::vector<CacheGroup>& groups, int64_t unit, int64_t whole_unit)
      : units_{{{unit, 1}, {whole_unit, 1}}} {
    for (const CacheGroup& group : groups) {
      keeps_all_ &= group.keeps_all;
      for (const bool with_partial : {true, false}) {
        Unit& each = units_[with_partial ? 0 : 1];
        each.num_redone = std::max(each.num_redone, group.num_redone(with_partial));
        has_drafts_ |= group.num_redone(with_partial) > 0;
      }
    }
  }

  // A repeated prompt hits all but its last tokens. Another request with the same first num_shared
  // tokens hits those tokens; with a drafter, it hits fewer of them if the next tokens differ. If
  // the request itself has hit the shared tokens, nothing more is retained for them.
  RetainedEnds ends(int64_t num_prompt, int64_t num_hit, int64_t num_shared) const {
    RetainedEnds ends{};
    if (keeps_all_) return ends;
    size_t n = 0;
    const auto add = [&](int64_t num_tokens, const Unit& unit) {
      ends[n++] = std::max<int64_t>(num_tokens, 0) / unit.tokens * unit.tokens;
    };
    for (const Unit& unit : units_) {
      add(num_prompt - unit.num_redone, unit);
      if (num_shared <= num_hit) continue;
      add(num_shared, unit);
      if (has_drafts_) add(num_shared - unit.num_redone, unit);
    }
    return ends;
  }

 private:
  struct Unit {
    int64_t tokens;
    int64_t num_redone;  // tokens after a hit that must also be known; at least the last token
  };
  std::array<Unit, 2> units_;  // the units of all hits, and of hits of whole blocks
  bool keeps_all_ = true, has_drafts_ = false;
};

}  // namespace kvcache
