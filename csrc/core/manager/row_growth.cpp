#include "core/manager/row_growth.h"

#include <algorithm>
#include <utility>

namespace kvcache {

void RowGrowth::set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit,
                        int64_t start) {
  const std::vector<BlockId>& blocks = hit.blocks[group.id];
  held->blocks.assign(blocks.begin(), blocks.end());
  held->num_published = held->size();
  // Where a window begins inside the hit's last block, the block lacks what lies before: of its
  // partial hashes only those behind the hit are valid for who reads them.
  const bool is_whole =
      group.first_hit_token(hit.num_tokens) <= held->num_published * group.block_size;
  held->num_partial =
      static_cast<int32_t>(is_whole ? held->num_published * group.num_hashes
                                    : hit.num_tokens / (group.block_size / group.num_hashes));
  // Of a group that is not cached the hit brings nothing.
  const int64_t first =
      std::max(group.first_hit_block(hit.num_tokens), group.first_needed_block(start));
  held->num_dropped = std::min(first, held->num_published);
  std::fill_n(held->blocks.begin(), held->num_dropped, kNullBlock);
  held->num_hits = static_cast<int32_t>(held->num_published);
  held->state_start = static_cast<int32_t>(hit.num_tokens);
  held->source = hit.sources[group.id];
  held->host_source = kNullBlock;
  held->keeps_state = false;
  const bool reads_state = group.holds_state() && start == hit.num_tokens;
  if (reads_state && !hit.on_host[group.id].empty()) {
    // The state is loaded into the page that goes on from it.
    held->host_source = hit.on_host[group.id].back().page;
    held->num_dropped = held->num_published;
  }
}

void RowGrowth::take_hit(ServedRow* served, const PrefixHit& hit) {
  for (const CacheGroup& group : *c_.groups) {
    if (!group.is_cached) continue;
    const RowBlocks& each = c_.rows->blocks(served->row)[group.id];
    const BlockId source = hit.sources[group.id];
    if (source != kNullBlock) {
      c_.pool->retain(&source, 1);  // until it was copied
      c_.pool->hit(&source, 1);
      c_.plan->hold(source);
    }
    if (hit.num_host_blocks > 0) {
      take_hit_on_host(served->row, group, hit);
    } else {
      c_.pool->retain(each.blocks.data() + each.num_dropped, each.num_alive());
      note_hits(each.blocks.data() + each.num_dropped, each.num_alive());
    }
  }
  // All that is taken is held: what is onboarded evicts nothing of it.
  if (hit.num_host_blocks > 0) onboard_hit(served, hit);
}

void RowGrowth::take_hit_on_host(int32_t row, const CacheGroup& group, const PrefixHit& hit) {
  const RowBlocks& each = c_.rows->blocks(row)[group.id];
  std::vector<BlockId> ids, pages;
  for (int64_t b = each.num_dropped; b < each.size(); ++b) {
    if (each[b] != kNullBlock) ids.push_back(each[b]);
  }
  for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
    if (on_host.column >= each.num_dropped) pages.push_back(on_host.page);
  }
  if (each.host_source != kNullBlock) pages.push_back(each.host_source);
  c_.pool->retain(ids.data(), static_cast<int64_t>(ids.size()));
  note_hits(ids.data(), static_cast<int64_t>(ids.size()));
  c_.host->pages().retain(pages.data(), static_cast<int64_t>(pages.size()));
  c_.host->pages().hit(pages.data(), static_cast<int64_t>(pages.size()));
}

void RowGrowth::note_hits(const BlockId* ids, int64_t n) {
  if (n == 0) return;
  c_.pool->hit(ids, n);
  if (c_.host != nullptr) c_.host->on_hit(ids, n);
}

// Blocks for the part of a hit that is on the host.
void RowGrowth::onboard_hit(ServedRow* served, const PrefixHit& hit) {
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = c_.rows->blocks(served->row)[group.id];
    for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
      if (on_host.column < each.num_dropped) continue;
      BlockId& id = each[on_host.column];
      c_.pool->allocate(1, &id);
      onboard(served, group, on_host.column, on_host.page, id, /*is_hit=*/true);
      ++c_.host->mutable_counts()->loaded_blocks;
    }
  }
}

// Takes over one reference of the page.
void RowGrowth::onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
                        BlockId block, bool is_hit) {
  const std::shared_ptr<TokenChain>& chain = (*c_.rows)[served->row].chain;
  c_.host->onboard(
      {c_.journal->numbers().num_steps, page, block, column, group.id, is_hit ? chain : nullptr});
  served->depends_from(column * group.block_size);
}

void RowGrowth::serve(ServedRow* served, const Demand& demand) {
  RowBlocks* held = c_.rows->blocks(served->row);
  std::array<int64_t, kMaxGroups> num_new;
  std::array<bool, kMaxGroups> moves;  // of states
  int64_t num_taken = 0, num_spare = demand.num_spare;
  if (demand.gives_up) give_up(served, demand);
  for (const CacheGroup& group : *c_.groups) {
    const GroupDemand& needs = demand[group];
    RowBlocks& each = held[group.id];
    served->num_before[group.id] = each.size();
    if (needs.num_skipped > 0) {
      each.resize(each.size() + needs.num_skipped);
      each.num_dropped = each.size();
    }
    const int64_t size = each.size();
    if (group.is_circular()) {
      int64_t& num_slots = c_.rows->info(served->row).num_slots;
      num_slots = std::max(num_slots, served->span.stop + served->span.lookahead);
    }
    if (needs.drop_to > each.num_dropped) drop(served->row, group, needs.drop_to);
    int64_t more = 0;
    if (needs.num_new > 0 && group.holds_tokens()) {
      more = std::min({group.num_prealloc, num_spare, group.max_blocks - size - needs.num_new});
      num_spare -= more;
    }
    if (each.keeps_state) {
      each.keeps_state = false;
      if (!needs.moves && needs.num_shared == 0) {
        more = std::min<int64_t>(num_spare, 1);
        num_spare -= more;
        // Written over by what comes next: the state is found no longer.
        if (more == 0) c_.pool->evict(&each[each.num_dropped], 1);
      }
    }
    if (group.holds_state()) moves[group.id] = needs.moves || more > 0;
    num_new[group.id] = needs.num_new + more;
    num_taken += needs.num_new + more + needs.num_shared;
  }
  if (num_taken == 0 && served->span.num_accepted == 0) return;
  taken_.resize(static_cast<size_t>(num_taken));
  c_.pool->allocate(num_taken, taken_.data());
  const BlockId* next = taken_.data();
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = held[group.id];
    const int64_t num_shared = demand[group].num_shared, n = num_new[group.id];
    if (group.holds_state()) {
      next = serve_state(served, group, {n, num_shared, moves[group.id]}, next);
      continue;
    }
    if (num_shared > 0) next = copy_on_write(served, group, num_shared, next);
    if (n == 0) continue;
    clear_uncomputed(served, group, next, n);
    each.blocks.insert(each.blocks.end(), next, next + n);
    next += n;
    if (each.source != kNullBlock) copy_source(served, group);
  }
}

// Behind a hit, and behind external tokens, a group that is not cached has zeros for the tokens
// before, in the blocks that it has of them; where blocks are written round, in all.
void RowGrowth::clear_uncomputed(ServedRow* served, const CacheGroup& group, const BlockId* blocks,
                                 int64_t n) {
  if (group.is_cached || group.holds_encoder() || !c_.plan->is_step()) return;
  const int64_t token = c_.rows->blocks(served->row)[group.id].size() * group.block_size;
  if (token >= served->span.start || (group.is_circular() && token > 0)) return;
  const int64_t num_before = ceil_div(served->span.start - token, group.block_size);
  const int64_t num_zeros = group.is_circular() ? n : std::min(num_before, n);
  for (int64_t i = 0; i < num_zeros; ++i) c_.plan->zero(blocks[i]);
  served->depends_from(token);
}

// A hit that ends inside a block: what it holds is copied into the row's own.
void RowGrowth::copy_source(ServedRow* served, const CacheGroup& group) {
  RowBlocks& each = c_.rows->blocks(served->row)[group.id];
  const int64_t column = served->num_before[group.id];
  c_.plan->copy(each.source, group.holds_state() ? each[each.num_dropped] : each[column]);
  c_.note_dropped(served->row, group, column, each.source);  // had, and not kept
  served->depends_from(column * group.block_size);
  each.source = kNullBlock;
}

// The row's own blocks in place of those that it writes and others hold. What they hold of it is
// copied; where that is nothing, they are only replaced. Returns the first of `own` not used.
const BlockId* RowGrowth::copy_on_write(ServedRow* served, const CacheGroup& group,
                                        int64_t num_shared, const BlockId* own) {
  const int32_t row = served->row;
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  const Span& span = served->span;
  const int64_t first =
      group.holds_state() ? span.state_column(group) : span.start / group.block_size;
  for (int64_t block = first; num_shared > 0; ++block) {
    const int64_t b = group.column_of(block);
    if (b >= each.size()) continue;  // circular: a new one
    BlockId& id = each[b];
    if (!holders_.is_shared(id)) continue;
    --num_shared;
    const BlockId shared = std::exchange(id, *own++);
    c_.note_access(row, &shared, 1);
    each.lower_hits(b);
    if (!group.holds_state()) c_.plan->replace(row, group.id, b, id);
    if (group.holds_state() || group.is_circular() || b * group.block_size < span.start) {
      c_.note_dropped(row, group, b, shared);  // had, and not kept
      each.state_start = static_cast<int32_t>(span.start);
      served->depends_from(b * group.block_size);
      c_.plan->copy(shared, id);
      if (c_.plan->is_step()) {
        c_.plan->hold(shared);  // until it is copied
        continue;
      }
    }
    c_.frees->release_or_defer(&shared, 1);
  }
  return own;
}

// The worker's table of the row is longer than that: it is sent anew.
void RowGrowth::give_up(ServedRow* served, const Demand& demand) {
  const int32_t row = served->row;
  const Span& span = served->span;
  c_.resend(row);
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& each = c_.rows->blocks(row)[group.id];
    if (group.holds_state() && span.num_accepted > 0) {
      settle_state(row, group, span, /*keeps_passed=*/false);
    }
    if (group.holds_state() && each.num_alive() > 0 && !demand[group].moves &&
        span.moves_state(group, /*has_page=*/true)) {  // it would: it goes on in place
      c_.pool->evict(&each[each.num_dropped], 1);
      const std::vector<BlockId> pages(each.blocks.begin() + each.num_dropped, each.blocks.end());
      each.set_pages(span.state_column(group), pages[0], {pages.begin() + 1, pages.end()});
    }
    c_.release_tail(row, group, each.size() - demand[group].num_surplus);
  }
  served->span.num_accepted = 0;  // settled
}

void RowGrowth::drop(int32_t row, const CacheGroup& group, int64_t drop_to) {
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  std::vector<BlockId> dropped;
  for (int64_t b = each.num_dropped; b < drop_to; ++b) {
    dropped.push_back(each[b]);
    c_.note_dropped(row, group, b, each[b]);
    each[b] = kNullBlock;
    c_.plan->replace(row, group.id, b, kNullBlock);
  }
  each.num_dropped = drop_to;
  std::reverse(dropped.begin(), dropped.end());  // tails are evicted before heads
  c_.note_access(row, dropped.data(), static_cast<int64_t>(dropped.size()));
  c_.frees->release_or_defer(dropped.data(), static_cast<int64_t>(dropped.size()));
}

// Pages of states: the first goes on, in a new page where it must, and is followed by those for
// drafts. `own` are new ones. Returns the first of them not used.
const BlockId* RowGrowth::serve_state(ServedRow* served, const CacheGroup& group,
                                      const StateDemand& needs, const BlockId* own) {
  const bool settles = served->span.num_accepted > 0;
  if (!settles && needs.num_new + needs.num_shared == 0) return own;
  RowBlocks& each = c_.rows->blocks(served->row)[group.id];
  const int64_t first = each.num_dropped;
  pages_before_.assign(each.blocks.begin() + first, each.blocks.end());
  if (settles) settle_state(served->row, group, served->span, /*keeps_passed=*/true);
  if (needs.num_shared > 0) own = copy_on_write(served, group, needs.num_shared, own);
  if (needs.moves) move_state(served, group, *own);
  each.blocks.insert(each.blocks.end(), own + needs.moves, own + needs.num_new);
  replace_changed(served->row, group, first);
  return own + needs.num_new;
}

void RowGrowth::settle_state(int32_t row, const CacheGroup& group, const Span& span,
                             bool keeps_passed) {
  RowBlocks& each = c_.rows->blocks(row)[group.id];
  const int64_t first = each.num_dropped, current = first + span.num_accepted;
  const int64_t first_token = c_.rows->first_token(row, group, first);
  std::vector<BlockId> spare;
  for (int64_t b = first; b < each.size(); ++b) {
    const int64_t num_tokens = span.start - (current - b);
    if (b == current) continue;
    const bool ends_block = b < current && num_tokens % group.block_size == 0;
    if (ends_block && (keeps_passed || holders_.is_shared(each[b]))) {
      left_states_.push_back({row, group.id, each[b], num_tokens, first_token});
      continue;
    }
    if (b < current) {
      c_.note_dropped(row, group, first, each[b]);  // had, and not kept
      c_.pool->evict(&each[b], 1);                  // written over: what it held is found no longer
    }
    spare.push_back(each[b]);
  }
  each.set_pages((span.start - 1) / group.block_size, each[current], spare);
  each.state_start = static_cast<int32_t>(span.start);
}

// The state goes on in this page; the pages for drafts stay behind it.
void RowGrowth::move_state(ServedRow* served, const CacheGroup& group, BlockId page) {
  RowBlocks& each = c_.rows->blocks(served->row)[group.id];
  const int64_t column = served->span.state_column(group), first = each.num_dropped;
  std::vector<BlockId> spare;
  if (each.host_source != kNullBlock) {
    onboard(served, group, column, each.host_source, page, /*is_hit=*/false);
    each.host_source = kNullBlock;
  } else if (each.source == kNullBlock) {  // else copy_source copies a hit inside a block
    if (each.num_alive() > 0) {
      c_.plan->copy(each[first], page);
      left_states_.push_back({served->row, group.id, each[first], served->span.start,
                              c_.rows->first_token(served->row, group, first)});
      spare.assign(each.blocks.begin() + first + 1, each.blocks.end());
    } else if (served->span.start == 0 && c_.plan->is_step()) {  // else it comes from elsewhere
      c_.plan->zero(page);
    }
  }
  each.set_pages(column, page, spare);
  each.state_start = static_cast<int32_t>(served->span.start);
  if (each.source != kNullBlock) copy_source(served, group);
}

// Entries from column `first` on that the worker's table has otherwise.
void RowGrowth::replace_changed(int32_t row, const CacheGroup& group, int64_t first) {
  const RowBlocks& each = c_.rows->blocks(row)[group.id];
  for (size_t i = 0; i < pages_before_.size(); ++i) {
    const int64_t column = first + static_cast<int64_t>(i);
    if (each[column] != pages_before_[i]) c_.plan->replace(row, group.id, column, each[column]);
  }
}

void RowGrowth::release_left_states(bool engine_copies) {
  for (const LeftState& left : left_states_) {
    c_.journal->note_dropped(left.row, (*c_.rows)[left.row], left.first_token, left.page);
    c_.note_access(left.row, &left.page, 1);
    if (engine_copies) {
      c_.frees->release_after(&left.page, 1, c_.journal->numbers().last_issued);
      continue;
    }
    // The step that is being made copies from it; outside of one, those issued may read it.
    const StepNumbers& steps = c_.journal->numbers();
    const int64_t last = c_.plan->is_step() ? steps.num_steps : steps.last_issued;
    c_.frees->release_or_defer(&left.page, 1, last);
  }
  left_states_.clear();
}

}  // namespace kvcache
