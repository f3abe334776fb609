// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/tokens.h"

namespace kvcache {

const PageRules& AttentionKind::rules() const { return kTokenRules; }

void TokenRules::drop(Growth* growth, int32_t row, const CacheGroup& group, int64_t drop_to) {
  RowBlocks& held = growth->held(row, group);
  std::vector<BlockId> dropped;
  for (int64_t b = held.num_dropped; b < drop_to; ++b) {
    dropped.push_back(held[b]);
    growth->note_dropped(row, group, b, held[b]);
    held[b] = kNullBlock;
    growth->replace(row, group, b, kNullBlock);
  }
  held.num_dropped = drop_to;
  std::reverse(dropped.begin(), dropped.end());  // tails are evicted before heads
  growth->release(row, dropped);
}

const BlockId* TokenRules::grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                                const Take& take, const BlockId* own) const {
  own = replace_shared_blocks(growth, served, group, take.num_shared, own, /*copies_all=*/false);
  if (take.num_new == 0) return own;
  RowBlocks& held = growth->held(served->row, group);
  if (!group.is_cached) zero_skipped(growth, served, group, own, take.num_new);
  held.append(own, take.num_new, group.max_blocks);
  if (held.source != kNullBlock) {
    growth->copy_source(served, group, held[served->num_before[group.id]]);
  }
  return own + take.num_new;
}

// After a hit or external tokens, a group that is not cached has no KV of the earlier tokens. Their
// blocks, the first of these new ones, are zeroed.
void TokenRules::zero_skipped(Growth* growth, ServedRow* served, const CacheGroup& group,
                              const BlockId* own, int64_t num_new) {
  const int64_t first = growth->held(served->row, group).size() * group.block_size;
  const int64_t num_tokens = served->span.start - first;
  if (num_tokens <= 0 || !growth->is_step()) return;
  const int64_t num_zeroed = std::min(ceil_div(num_tokens, group.block_size), num_new);
  for (int64_t i = 0; i < num_zeroed; ++i) growth->zero(own[i]);
  served->depends_from(first);
}

int64_t TokenRules::quiet_until(const CacheGroup& group, const RowBlocks& held, int64_t) const {
  const int64_t num_slots = held.size() * group.block_size;
  if (group.keeps_all) return held.size() < group.max_blocks ? num_slots : kUnbounded;
  // Binary search for the number of tokens after which a block leaves the window. The first needed
  // token never decreases, and is at most the number of computed tokens.
  int64_t first = held.num_dropped * group.block_size, last = num_slots;
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (group.first_needed_block(middle) > held.num_dropped) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

// Surplus blocks contain no token of the span. They are from preallocation or an earlier step's
// lookahead.
PageRules::LeastDemand TokenRules::least_demand(const DemandBasis& on, const CacheGroup& group,
                                                const RowBlocks& held, const Span& span,
                                                const GroupDemand& needs) const {
  const int64_t needed = ceil_div(span.stop + span.lookahead, group.block_size);
  const int64_t kept = std::min(std::max(needed, held.num_dropped), held.size());
  int64_t num_freed = 0;
  for (int64_t b = kept; b < held.size(); ++b) num_freed += on.pool->ref_count(held[b]) == 1;
  return {held.size() - kept, num_freed, kept - needs.drop_to + needs.num_new};
}

PageRules::ChunkDemand TokenRules::chunk_demand(const CacheGroup& group, const RowBlocks& held,
                                                const Span&, const Span& span) const {
  const int64_t stop =
      std::min(ceil_div(span.stop + span.lookahead, group.block_size), group.max_blocks);
  // Columns that are null in the hit stay null.
  const int64_t needed = std::max(group.first_needed_block(span.start), held.num_dropped);
  return {std::max<int64_t>(stop - needed, 0),
          std::max<int64_t>(stop - std::max(needed, held.size()), 0),
          std::min(needed, held.size())};
}

bool TokenRules::can_resume(const CacheGroup& group, const RowBlocks& held,
                            const AdmissionInfo& info, int64_t num_tokens) const {
  const int64_t first = group.first_needed_token(num_tokens);
  // Within the hit, blocks that only a shorter hit would read were never loaded, even if the row
  // holds a block in their column.
  if (group.is_cached && num_tokens < info.hit_end &&
      first < std::min(num_tokens, group.first_needed_token(info.hit_end))) {
    return false;
  }
  const bool needs_any = num_tokens % group.block_size != 0 || first < num_tokens;
  return !needs_any || held.num_dropped <= group.first_needed_block(num_tokens);
}

void TokenRules::publish_parts(Publishing* publishing, int32_t row, const CacheGroup& group,
                               int64_t num_hashed) {
  RowBlocks& held = publishing->held(row, group);
  for (; held.num_partial < num_hashed; ++held.num_partial) {
    const int64_t block = held.num_partial / group.num_hashes;
    const bool is_whole = (int64_t{held.num_partial} + 1) % group.num_hashes == 0;
    if (is_whole || block < held.num_dropped) continue;
    const int64_t end = (int64_t{held.num_partial} + 1) * group.block_size / group.num_hashes;
    if (!group.may_hit_part(end, publishing->info(row).retained)) continue;
    publishing->publish_part(row, group, block, held.num_partial);
  }
}

void TokenRules::publish(Publishing* publishing, int32_t row, const CacheGroup& group,
                         int64_t num_hashed) const {
  if (group.has_partial) publish_parts(publishing, row, group, num_hashed);
  RowBlocks& held = publishing->held(row, group);
  // Blocks that no retained hit can read are not published, and are reused before all cached
  // blocks.
  const int64_t num_full = num_hashed / group.num_hashes;
  const int64_t first = std::max(held.num_published, held.num_dropped);
  const RetainedEnds& retained = publishing->info(row).retained;
  for (int64_t run = first, stop; run < num_full; run = stop + 1) {
    stop = group.keeps_all ? num_full : run;
    while (stop < num_full && group.may_be_hit(stop, retained)) ++stop;
    if (stop > run) publishing->publish_run(row, group, run, held.blocks.data() + run, stop - run);
  }
  held.num_published = std::max(held.num_published, num_full);
}

bool TokenRules::shares_from(const SharedBlocks& holders, const CacheGroup& group,
                             const RowBlocks& held, int64_t start) const {
  return num_shared(holders, group, held, start, held.size() * group.block_size) > 0;
}

}  // namespace kvcache
