// SPDX-License-Identifier: Apache-2.0
// Pages with the KV of block_size tokens. A row has one page per block that is still read.
#pragma once

#include <algorithm>

#include "core/groups/rules/effects.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class TokenRules final : public PageRules {
 public:
  constexpr TokenRules()
      : PageRules({/*follows_sequence=*/true, /*has_hits=*/true, /*appends=*/true,
                   /*updates_in_place=*/false}) {}

  // Inlined, because it runs for every row of a step and most arguments are constants at the call.
  [[gnu::always_inline]] void demand(const DemandBasis& on, const CacheGroup& group,
                                     const RowBlocks& held, const DemandFor& asked,
                                     GroupDemand* needs, int64_t* num_free) const override {
    const int64_t start = asked.span.start, stop = asked.span.stop + asked.span.lookahead;
    const int64_t size = held.size();
    if (stop > size * group.block_size) {
      const int64_t most = std::min(ceil_div(stop, group.block_size), group.max_blocks);
      needs->num_new = std::max<int64_t>(most - size, 0);
    }
    if (asked.may_share) needs->num_shared = num_shared(*on.holders, group, held, start, stop);
    const bool has_live_blocks = size > held.num_dropped;
    if (asked.skip_for > 0 && !has_live_blocks) {  // new blocks before the window need no page
      needs->num_skipped =
          std::clamp<int64_t>(group.first_needed_block(asked.skip_for) - size, 0, needs->num_new);
      needs->num_new -= needs->num_skipped;
    }
    needs->drop_to = std::max(held.num_dropped,
                              std::min(group.first_needed_block(asked.span.first_start()), size));
    // Blocks that leave a window make room for new ones, unless a step may still read them.
    for (int64_t b = held.num_dropped; b < needs->drop_to && on.frees_at_once; ++b) {
      *num_free += on.pool->ref_count(held[b]) == 1;
    }
  }
  Take prepare(Growth* growth, const ServedRow& served, const CacheGroup& group,
               const GroupDemand& needs, int64_t* num_spare) const override {
    RowBlocks& held = growth->held(served.row, group);
    if (needs.num_skipped > 0) {
      held.resize(held.size() + needs.num_skipped);
      held.num_dropped = held.size();
    }
    if (needs.drop_to > held.num_dropped) drop(growth, served.row, group, needs.drop_to);
    int64_t more = 0;
    if (needs.num_new > 0) {
      const int64_t most = group.max_blocks - held.size() - needs.num_new;
      more = std::min({group.num_prealloc, *num_spare, most});
      *num_spare -= more;
    }
    return {needs.num_new + more, needs.num_shared, false};
  }
  const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group, const Take& take,
                      const BlockId* own) const override;
  int64_t quiet_until(const CacheGroup& group, const RowBlocks& held, int64_t) const override;
  LeastDemand least_demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                           const Span& span, const GroupDemand& needs) const override;
  ChunkDemand chunk_demand(const CacheGroup& group, const RowBlocks& held, const Span& first,
                           const Span& span) const override;
  Returning returning(const CacheGroup& group, const RowBlocks& held,
                      const Span& span) const override {
    const int64_t needed = std::min(group.first_needed_block(span.first_start()), held.size());
    return {std::max(held.num_dropped, needed), true};
  }
  int64_t num_slots(const CacheGroup& group, const RowBlocks& held) const override {
    return held.size() * group.block_size;
  }
  bool can_resume(const CacheGroup& group, const RowBlocks& held, const AdmissionInfo& info,
                  int64_t num_tokens) const override;
  // A row may continue inside a block only if no other row can hold the block.
  int64_t resume_point(const CacheGroup& group, const RowBlocks& held,
                       int64_t limit) const override {
    const bool is_own = limit / group.block_size >= held.num_hits;
    return is_own ? limit : limit - limit % group.block_size;
  }
  void publish(Publishing* publishing, int32_t row, const CacheGroup& group,
               int64_t num_hashed) const override;
  bool shares_from(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                   int64_t start) const override;
  // Drops the blocks before column `drop_to`.
  static void drop(Growth* growth, int32_t row, const CacheGroup& group, int64_t drop_to);

 private:
  // Publishes the parts of blocks within the first num_hashed hash blocks.
  static void publish_parts(Publishing* publishing, int32_t row, const CacheGroup& group,
                            int64_t num_hashed);
  static void zero_skipped(Growth* growth, ServedRow* served, const CacheGroup& group,
                           const BlockId* own, int64_t num_new);
  // Returns the number of shared blocks to which the KV of tokens [start, stop) is written.
  static int64_t num_shared(const SharedBlocks& holders, const CacheGroup& group,
                            const RowBlocks& held, int64_t start, int64_t stop) {
    const int64_t last = std::min(ceil_div(stop, group.block_size), held.size());
    int64_t n = 0;
    for (int64_t b = start / group.block_size; b < last; ++b) n += holders.is_shared(held[b]);
    return n;
  }
};

inline constexpr TokenRules kTokenRules;

// Calls `ask` with the group's rules. The token rules are inlined, because most groups use them.
template <class Ask>
[[gnu::always_inline]] inline auto with_rules(const CacheGroup& group, const Ask& ask) {
  if (group.rules == &kTokenRules) return ask(kTokenRules);
  return ask(*group.rules);
}

}  // namespace kvcache
