// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/circular.h"

#include "core/groups/rules/effects.h"

namespace kvcache {

void CircularRules::demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                           const DemandFor& asked, GroupDemand* needs, int64_t*) const {
  const int64_t stop = ceil_div(asked.span.stop + asked.span.lookahead, group.block_size);
  needs->num_new = std::max<int64_t>(std::min(stop, group.max_blocks) - held.size(), 0);
  if (!asked.may_share) return;
  const int64_t first = asked.span.start / group.block_size;
  for (int64_t b = first; b < std::min(stop, first + group.max_blocks); ++b) {
    const int64_t column = b % group.max_blocks;
    needs->num_shared += column < held.size() && on.holders->is_shared(held[column]);
  }
}

// After a hit or external tokens, new blocks are zeroed, because they do not contain the KV of
// earlier tokens.
const BlockId* CircularRules::grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                                   const Take& take, const BlockId* own) const {
  own = replace_shared_blocks(growth, served, group, take.num_shared, own, /*copies_all=*/true);
  RowBlocks& held = growth->held(served->row, group);
  if (take.num_new > 0 && held.size() == 0 && served->span.start > 0 && growth->is_step()) {
    for (int64_t i = 0; i < take.num_new; ++i) growth->zero(own[i]);
    served->depends_from(0);
  }
  held.blocks.insert(held.blocks.end(), own, own + take.num_new);
  return own + take.num_new;
}

// The row never drops a block, so `num_dropped` is 0.
PageRules::ChunkDemand CircularRules::chunk_demand(const CacheGroup& group, const RowBlocks& held,
                                                   const Span&, const Span& span) const {
  const int64_t stop =
      std::min(ceil_div(span.stop + span.lookahead, group.block_size), group.max_blocks);
  return {stop, std::max<int64_t>(stop - held.size(), 0), 0};
}

// Returns false if a token that must be read again has been overwritten.
bool CircularRules::can_resume(const CacheGroup& group, const RowBlocks&, const AdmissionInfo& info,
                               int64_t num_tokens) const {
  return group.has_places_for(num_tokens, info.num_slots);
}

// Checks all blocks, because the row may write to every block of the buffer again.
bool CircularRules::shares_from(const SharedBlocks& holders, const CacheGroup&,
                                const RowBlocks& held, int64_t) const {
  return std::any_of(held.blocks.begin(), held.blocks.end(),
                     [&](BlockId id) { return holders.is_shared(id); });
}

}  // namespace kvcache
