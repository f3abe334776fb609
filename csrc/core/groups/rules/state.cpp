// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/state.h"

#include "core/groups/rules/effects.h"

namespace kvcache {

namespace {

// Returns the number of tokens that the state in this column summarizes. The column is at most the
// one in which the row continues at token span.start.
int64_t tokens_at(const RowBlocks& held, const Span& span, int64_t column) {
  return span.start - (held.num_dropped + span.num_accepted - column);
}

// Whether this column contains a state at the end of a block, in a page that another row also
// holds.
bool ends_shared_block(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                       const Span& span, int64_t column) {
  return tokens_at(held, span, column) % group.block_size == 0 && holders.is_shared(held[column]);
}

// Returns the number of pages that contain a state at the end of a block and that the row leaves,
// because accepted drafts have moved past them.
int64_t num_passed(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                   const Span& span, bool gives_up) {
  const int64_t before = span.start - span.num_accepted;
  if (!gives_up) return (span.start - 1) / group.block_size - (before - 1) / group.block_size;
  int64_t n = 0;
  for (int64_t i = 0; i < span.num_accepted; ++i) {
    n += ends_shared_block(holders, group, held, span, held.num_dropped + i);
  }
  return n;
}

// Starting at column `first`, replaces the entries that differ from `before`, the worker's table.
void replace_changed(Growth* growth, int32_t row, const CacheGroup& group, int64_t first,
                     const std::vector<BlockId>& before) {
  const RowBlocks& held = growth->held(row, group);
  for (size_t i = 0; i < before.size(); ++i) {
    const int64_t column = first + static_cast<int64_t>(i);
    if (held[column] != before[i]) growth->replace(row, group, column, held[column]);
  }
}

}  // namespace

// A row that gives up blocks stays in its current page unless another row shares that page.
bool StateRules::moves(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                       const Span& span, bool gives_up) {
  const bool has_any = held.num_alive() > 0;
  return leaves_page(group, span, has_any) &&
         !(gives_up && has_any && !holders.is_shared(held[held.num_dropped + span.num_accepted]));
}

// A row needs one page for its state, and one for each draft. The row's pages are reused, except
// for states at block ends.
void StateRules::demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                        const DemandFor& asked, GroupDemand* needs, int64_t*) const {
  const Span& span = asked.span;
  needs->moves = moves(*on.holders, group, held, span, asked.gives_up);
  int64_t num_spare = 0;
  if (held.num_alive() > 0) {
    num_spare = held.num_alive() - 1 - num_passed(*on.holders, group, held, span, asked.gives_up);
  }
  needs->num_new = needs->moves + std::max<int64_t>(span.num_drafts - num_spare, 0);
  if (asked.may_share && !needs->moves) {
    needs->num_shared = on.holders->is_shared(held[held.num_dropped + span.num_accepted]);
  }
}

// The row releases its last pages, which are for drafts beyond the span. It keeps the page in which
// the state continues, and shared pages that accepted drafts have moved past. If there is no other
// row, no page is shared, and the row continues in its own page.
PageRules::LeastDemand StateRules::least_demand(const DemandBasis& on, const CacheGroup& group,
                                                const RowBlocks& held, const Span& span,
                                                const GroupDemand&) const {
  const int64_t num_passed_shared = num_passed(*on.holders, group, held, span, /*gives_up=*/true);
  const int64_t num_surplus =
      std::max<int64_t>(held.num_alive() - 1 - num_passed_shared - span.num_drafts, 0);
  const int64_t kept = held.num_dropped + span.num_accepted;
  int64_t num_left = num_surplus, num_freed = 0;
  for (int64_t b = held.size() - 1; num_left > 0; --b) {
    if (b == kept || (b < kept && ends_shared_block(*on.holders, group, held, span, b))) continue;
    num_freed += on.pool->ref_count(held[b]) == 1;
    --num_left;
  }
  return {num_surplus, num_freed, 1 + span.num_drafts};
}

// After the first chunk, the state continues in place if no page is free.
PageRules::ChunkDemand StateRules::chunk_demand(const CacheGroup& group, const RowBlocks& held,
                                                const Span& first, const Span& span) const {
  const bool begins = span.start == first.start;
  const int64_t num_before = begins ? held.num_alive() : 1;
  const int64_t num_more = (begins && leaves_page(group, span, num_before > 0)) +
                           std::min(first.lookahead, group.num_speculative);
  return {num_before + num_more, !begins + num_more, begins ? held.num_dropped : held.size()};
}

bool StateRules::shares_from(const SharedBlocks& holders, const CacheGroup&, const RowBlocks& held,
                             int64_t) const {
  return held.num_alive() > 0 && holders.is_shared(held[held.num_dropped]);
}

PageRules::Take StateRules::prepare(Growth* growth, const ServedRow& served,
                                    const CacheGroup& group, const GroupDemand& needs,
                                    int64_t* num_spare) const {
  RowBlocks& held = growth->held(served.row, group);
  Take take{needs.num_new, needs.num_shared, needs.moves};
  if (!held.keeps_state) return take;
  held.keeps_state = false;
  if (needs.moves || needs.num_shared > 0) return take;
  if (*num_spare > 0) {
    --*num_spare;
    return {needs.num_new + 1, 0, true};
  }
  // The next tokens overwrite the state, so later requests must no longer hit it.
  growth->evict(held[held.num_dropped]);
  return take;
}

// The state continues in the first page, or in a new page if required. Pages for drafts follow.
const BlockId* StateRules::grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                                const Take& take, const BlockId* own) const {
  const bool settles = served->span.num_accepted > 0;
  if (!settles && take.num_new + take.num_shared == 0) return own;
  RowBlocks& held = growth->held(served->row, group);
  const int64_t first = held.num_dropped;
  const std::vector<BlockId> before(held.blocks.begin() + first, held.blocks.end());
  if (settles) settle(growth, served->row, group, served->span, /*keeps_passed=*/true);
  if (take.num_shared > 0) {
    growth->replace_shared(served, group, column_of(group, served->span), *own++, /*copies=*/true);
  }
  if (take.moves) move(growth, served, group, *own);
  held.blocks.insert(held.blocks.end(), own + take.moves, own + take.num_new);
  replace_changed(growth, served->row, group, first, before);
  return own + take.num_new;
}

void StateRules::give_up(Growth* growth, ServedRow* served, const CacheGroup& group,
                         const GroupDemand& needs) const {
  const Span& span = served->span;
  RowBlocks& held = growth->held(served->row, group);
  if (span.num_accepted > 0) {
    settle(growth, served->row, group, span, /*keeps_passed=*/false);
  }
  if (held.num_alive() == 0 || needs.moves || !leaves_page(group, span, /*has_page=*/true)) return;
  // The state continues in place.
  growth->evict(held[held.num_dropped]);
  const std::vector<BlockId> pages(held.blocks.begin() + held.num_dropped, held.blocks.end());
  held.set_pages(column_of(group, span), pages[0], {pages.begin() + 1, pages.end()});
}

void StateRules::accept_drafts(Growth* growth, int32_t row, const CacheGroup& group,
                               const Span& span) const {
  settle(growth, row, group, span, /*keeps_passed=*/true);
}

// For a row that continues at token span.start, makes the page that contains its state the first
// page again. Pages of accepted drafts become spare pages. However, the row leaves a page with a
// state at a block end if `keeps_passed` or if another row also holds the page.
void StateRules::settle(Growth* growth, int32_t row, const CacheGroup& group, const Span& span,
                        bool keeps_passed) {
  RowBlocks& held = growth->held(row, group);
  const int64_t current = held.num_dropped + span.num_accepted;
  std::vector<BlockId> spare;
  for (int64_t b = held.num_dropped; b < current; ++b) {
    const int64_t num_tokens = tokens_at(held, span, b);
    const bool leaves =
        num_tokens % group.block_size == 0 && (keeps_passed || growth->is_shared(held[b]));
    if (leaves) {
      growth->leave(row, group, b, held[b], num_tokens);
      continue;
    }
    growth->note_dropped(row, group, b, held[b]);
    growth->evict(held[b]);  // the page is overwritten, so it must no longer be hit
    spare.push_back(held[b]);
  }
  spare.insert(spare.end(), held.blocks.begin() + current + 1, held.blocks.end());
  held.set_pages((span.start - 1) / group.block_size, held[current], spare);
  held.state_start = static_cast<int32_t>(span.start);
}

// The state continues in this page, and the pages for drafts follow it.
void StateRules::move(Growth* growth, ServedRow* served, const CacheGroup& group, BlockId page) {
  RowBlocks& held = growth->held(served->row, group);
  const int64_t column = column_of(group, served->span), first = held.num_dropped;
  const int64_t start = served->span.start;
  std::vector<BlockId> spare;
  if (held.host_source != kNullBlock) {
    growth->onboard(served, group, column, held.host_source, page, /*is_hit=*/false);
    held.host_source = kNullBlock;
  } else if (held.source == kNullBlock) {  // a hit that ends inside a block is copied below
    if (held.num_alive() > 0) {
      growth->copy(held[first], page);
      growth->leave(served->row, group, first, held[first], start);
      spare.assign(held.blocks.begin() + first + 1, held.blocks.end());
    } else if (start == 0 && growth->is_step()) {  // otherwise the state comes from another source
      growth->zero(page);
    }
  }
  held.set_pages(column, page, spare);
  held.state_start = static_cast<int32_t>(start);
  if (held.source != kNullBlock) growth->copy_source(served, group, page);
}

// Publishes the state after the last token that is not a draft, and states after known drafts.
void StateRules::publish(Publishing* publishing, int32_t row, const CacheGroup& group,
                         int64_t /*num_hashed*/) const {
  const Row& r = publishing->row(row);
  const RowBlocks& held = publishing->held(row, group);
  const int64_t num_certain = r.num_computed - r.num_drafts, size = group.block_size;
  // The first page has the state after the last token that is not a draft, and each page after it
  // the state after one more draft.
  const auto publish_after = [&](int64_t num_tokens) {
    const BlockId page = held[held.num_dropped + (num_tokens - num_certain)];
    publish_left(publishing, row, group, num_tokens, page);
  };
  if (held.num_alive() > 0) {
    publish_after(num_certain);
    const int64_t next_boundary = (num_certain / size + 1) * size;
    for (int64_t n = next_boundary; n <= r.num_computed; n += size) publish_after(n);
  }
  if (group.has_partial) keep(publishing, row, group);
}

// A state at a block boundary is kept if a step or an accepted draft ended there.
void StateRules::publish_left(Publishing* publishing, int32_t row, const CacheGroup& group,
                              int64_t num_tokens, BlockId page) const {
  const Row& r = publishing->row(row);
  RowBlocks& held = publishing->held(row, group);
  if (r.next_publish == kUnbounded) return;
  const int64_t num_passed = num_tokens / group.block_size;
  if (num_tokens % group.block_size != 0) {
    held.num_published = std::max(held.num_published, num_passed);
    return;
  }
  if (num_passed <= held.num_published ||
      num_passed * group.num_hashes > r.chain->num_known_hashes()) {
    return;
  }
  if (group.may_be_hit(num_passed - 1, publishing->info(row).retained)) {
    publishing->publish_run(row, group, num_passed - 1, &page, 1);
  }
  held.num_published = num_passed;
}

// A state inside a block is kept if a step of the prompt ended there at a hash boundary, unless it
// is cached already. The row's next step then leaves the page.
void StateRules::keep(Publishing* publishing, int32_t row, const CacheGroup& group) {
  const Row& r = publishing->row(row);
  RowBlocks& held = publishing->held(row, group);
  const int64_t hash_block_size = group.block_size / group.num_hashes;
  const int64_t num_hashed = r.num_computed / hash_block_size;
  if (r.num_drafts > 0) return;  // not a step of a prompt
  if (num_hashed > r.chain->num_known_hashes()) return;
  if (r.next_publish == kUnbounded || num_hashed <= held.num_partial) return;
  held.num_partial = static_cast<int32_t>(num_hashed);
  const AdmissionInfo& info = publishing->info(row);
  const bool is_part =
      r.num_computed % hash_block_size == 0 && r.num_computed % group.block_size != 0;
  if (!is_part || r.num_computed > info.num_prompt) return;
  if (!group.may_hit_part(r.num_computed, info.retained)) return;
  const Hash& hash = r.chain->known_hash(num_hashed - 1);
  if (publishing->has_part(hash, group)) return;
  publishing->publish_part(row, group, held.num_dropped, num_hashed - 1);
  held.keeps_state = true;
  publishing->disturb(row);
}

bool StateRules::publishes_part(const AdmissionInfo& info, int64_t num_tokens) const {
  return num_tokens <= info.num_prompt;
}

// Pages for drafts do not move to the host, because all tokens count as accepted.
std::vector<BlockId> StateRules::leave_device(const Row& row, const CacheGroup& group,
                                              RowBlocks* held) const {
  if (held->num_alive() <= 1) return {};
  const auto first = held->blocks.begin() + held->num_dropped, current = first + row.num_drafts;
  std::vector<BlockId> passed(first, current);
  held->set_pages((row.num_computed - 1) / group.block_size, *current, {});
  return passed;
}

}  // namespace kvcache
