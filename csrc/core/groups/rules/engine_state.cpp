// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/engine_state.h"

#include <algorithm>
#include <vector>

#include "core/groups/rules/effects.h"
#include "core/groups/rules/tokens.h"

namespace kvcache {

void EngineStateRules::demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                              const DemandFor& asked, GroupDemand* needs, int64_t* num_free) const {
  const int64_t size = held.size(), columns = num_columns(group, asked.span.stop);
  if (columns > size || !has_pages(group, held)) {
    needs->num_new = 1 + (has_pages(group, held) ? 0 : group.num_speculative);
  }
  needs->drop_to = std::max(held.num_dropped,
                            std::min(group.first_needed_block(asked.span.first_start()), size));
  for (int64_t b = held.num_dropped; b < needs->drop_to && on.frees_at_once; ++b) {
    *num_free += on.pool->ref_count(held[b]) == 1;
  }
}

// A row that enters another block holds one more page during a step. As in vLLM, this page is not
// counted.
PageRules::ChunkDemand EngineStateRules::chunk_demand(const CacheGroup& group,
                                                      const RowBlocks& held, const Span& first,
                                                      const Span& span) const {
  const bool begins = span.start == first.start;
  const int64_t num_pages = 1 + group.num_speculative;
  return {num_pages + (begins ? held.num_alive() : 0), num_pages,
          begins ? held.num_dropped : held.size()};
}

// A call at the end of a block publishes the block's page, and a call at the next token drops it.
int64_t EngineStateRules::quiet_until(const CacheGroup& group, const RowBlocks& held,
                                      int64_t) const {
  if (!has_pages(group, held)) return 0;
  if (group.max_blocks == 1) return kUnbounded;
  return (held.num_dropped + 1) * group.block_size;
}

PageRules::Take EngineStateRules::prepare(Growth* growth, const ServedRow& served,
                                          const CacheGroup& group, const GroupDemand& needs,
                                          int64_t*) const {
  if (needs.drop_to > growth->held(served.row, group).num_dropped) {
    kTokenRules.drop(growth, served.row, group, needs.drop_to);
  }
  return {needs.num_new, 0, false};
}

const BlockId* EngineStateRules::grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                                      const Take& take, const BlockId* own) const {
  if (take.num_new == 0) return own;
  RowBlocks& held = growth->held(served->row, group);
  const int64_t columns = num_columns(group, served->span.stop);
  const int64_t num_drafts = has_pages(group, held) ? group.num_speculative : 0;
  // The columns before the pages for drafts, and the column in which the row continues.
  const int64_t before = held.size() - num_drafts, first = columns - 1 - group.num_speculative;
  if (first > before) {  // null columns follow, so the row leaves its earlier pages
    for (int64_t b = held.num_dropped; b < before; ++b) {
      growth->leave(served->row, group, b, held[b], (b + 1) * group.block_size);
    }
    std::vector<BlockId> pages(held.blocks.begin() + before, held.blocks.end());
    std::rotate(pages.begin(), pages.begin() + std::min(first - before, num_drafts), pages.end());
    held.blocks.assign(static_cast<size_t>(first), kNullBlock);
    held.blocks.insert(held.blocks.end(), pages.begin(), pages.end());
    held.num_dropped = first;
  }
  held.blocks.insert(held.blocks.end(), own, own + take.num_new);
  return own + take.num_new;
}

void EngineStateRules::publish(Publishing* publishing, int32_t row, const CacheGroup& group,
                               int64_t num_hashed) const {
  kTokenRules.publish(publishing, row, group, num_hashed);
}

}  // namespace kvcache
