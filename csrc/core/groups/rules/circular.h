// SPDX-License-Identifier: Apache-2.0
// Pages with the KV of the most recent tokens, in a circular buffer of blocks.
#pragma once

#include "core/groups/rules/page_rules.h"

namespace kvcache {

class CircularRules final : public PageRules {
 public:
  constexpr CircularRules()
      : PageRules({/*follows_sequence=*/true, /*has_hits=*/false, /*appends=*/false,
                   /*updates_in_place=*/false}) {}

  void demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
              const DemandFor& asked, GroupDemand* needs, int64_t* num_free) const override;
  ChunkDemand chunk_demand(const CacheGroup& group, const RowBlocks& held, const Span& first,
                           const Span& span) const override;
  int64_t quiet_until(const CacheGroup& group, const RowBlocks& held, int64_t) const override {
    return held.size() < group.max_blocks ? held.size() * group.block_size : kUnbounded;
  }
  const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group, const Take& take,
                      const BlockId* own) const override;
  bool shares_from(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                   int64_t start) const override;
  bool can_resume(const CacheGroup& group, const RowBlocks& held, const AdmissionInfo& info,
                  int64_t num_tokens) const override;
  // The first block is returned, because any block of the buffer may contain tokens after the
  // limit. Blocks are shared only by forks.
  int64_t first_computed(const CacheGroup&, const RowBlocks&, int64_t) const override { return 0; }
  int64_t num_valid(const CacheGroup&, int64_t, int64_t limit) const override { return limit; }
  bool may_share_onboard(const CacheGroup&, int64_t, int64_t) const override { return false; }
};

inline constexpr CircularRules kCircularRules;

}  // namespace kvcache
