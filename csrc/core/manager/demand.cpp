#include "core/manager/demand.h"

#include <algorithm>

namespace kvcache {

namespace {

int64_t num_encoder_blocks(const CacheGroup& group, const TokenChain& chain) {
  return ceil_div(chain.num_encoder_tokens(), group.block_size);
}

// Blocks in which tokens start to stop - 1 are written, and that others hold.
int64_t num_shared(const BlockHolders& holders, const CacheGroup& group, const RowBlocks& held,
                   int64_t start, int64_t stop) {
  const int64_t first = start / group.block_size;
  int64_t n = 0, last = std::min(ceil_div(stop, group.block_size), held.size());
  if (group.is_circular()) {
    last = std::min(ceil_div(stop, group.block_size), first + group.max_blocks);
    for (int64_t b = first; b < last; ++b) {
      const int64_t column = group.column_of(b);
      n += column < held.size() && holders.is_shared(held[column]);
    }
    return n;
  }
  for (int64_t b = first; b < last; ++b) n += holders.is_shared(held[b]);
  return n;
}

// Pages of states at the ends of blocks that accepted drafts have passed, and that the row leaves.
int64_t num_passed(const BlockHolders& holders, const CacheGroup& group, const RowBlocks& held,
                   const Span& span, bool gives_up) {
  const int64_t before = span.start - span.num_accepted;
  if (!gives_up) return (span.start - 1) / group.block_size - (before - 1) / group.block_size;
  int64_t n = 0;
  for (int64_t i = 0; i < span.num_accepted; ++i) {
    n += (before + i) % group.block_size == 0 && holders.is_shared(held[held.num_dropped + i]);
  }
  return n;
}

// Whether the state goes on in a new page. A row that gives up goes on in its own where it may.
bool moves(const BlockHolders& holders, const CacheGroup& group, const RowBlocks& held,
           const Span& span, bool gives_up) {
  const bool has_any = held.num_alive() > 0;
  return span.moves_state(group, has_any) &&
         !(gives_up && has_any && !holders.is_shared(held[held.num_dropped + span.num_accepted]));
}

// The pages of states that a row writes: one, and one for each draft. Those that it has serve
// again, but for states at the ends of blocks.
void set_states(const BlockHolders& holders, const CacheGroup& group, const RowBlocks& held,
                const Span& span, bool gives_up, GroupDemand* needs) {
  needs->moves = moves(holders, group, held, span, gives_up);
  int64_t num_spare = 0;
  if (held.num_alive() > 0) {
    num_spare = held.num_alive() - 1 - num_passed(holders, group, held, span, gives_up);
  }
  needs->num_new = needs->moves + std::max<int64_t>(span.num_drafts - num_spare, 0);
}

// Blocks at the end of a row's table in which no token of the span has a slot: preallocation or an
// earlier step's lookahead took them. Of states: pages for more drafts than the span has.
int64_t num_surplus(const BlockHolders& holders, const CacheGroup& group, const RowBlocks& held,
                    const Span& span) {
  if (group.holds_state()) {
    const int64_t num_left = num_passed(holders, group, held, span, /*gives_up=*/true);
    return std::max<int64_t>(held.num_alive() - 1 - num_left - span.num_drafts, 0);
  }
  if (!group.holds_tokens()) return 0;
  const int64_t needed = ceil_div(span.stop + span.lookahead, group.block_size);
  return std::max<int64_t>(held.size() - std::max(needed, held.num_dropped), 0);
}

// The inputs that all demands share.
struct Basis {
  const std::vector<CacheGroup>* groups;
  const BlockPool* pool;
  const BlockHolders& holders;
  int64_t watermark_blocks;
  bool frees_at_once;
};

// `skip_for`: of a row that begins, the token that is read for; blocks before what it reads stay
// null. Inlined, as every row of a step asks it: most of it is known where it is called.
[[gnu::always_inline]] inline Demand demand_of(const Basis& on, const RowBlocks* held,
                                               const Span& span, const Supply& supply,
                                               int64_t skip_for, bool may_share, bool gives_up) {
  Demand demand;
  const int64_t start = span.start, stop = span.stop + span.lookahead;
  int64_t num_new = 0, num_free = supply.num_free;
  for (const CacheGroup& group : *on.groups) {
    const RowBlocks& each = held[group.id];
    const int64_t size = each.size(), num_slots = size * group.block_size;
    GroupDemand& needs = demand[group];  // in place: a copy would wait for each field
    needs = {0, each.num_dropped, 0, 0, 0, false};
    if (group.holds_state()) {
      set_states(on.holders, group, each, span, gives_up, &needs);
      if (may_share && !needs.moves) {
        needs.num_shared = on.holders.is_shared(each[each.num_dropped + span.num_accepted]);
      }
    } else if (group.holds_tokens()) {
      if (stop > num_slots) {
        const int64_t most = std::min(ceil_div(stop, group.block_size), group.max_blocks);
        needs.num_new = std::max<int64_t>(most - size, 0);
      }
      if (may_share) needs.num_shared = num_shared(on.holders, group, each, start, stop);
      if (skip_for > 0 && size == each.num_dropped) {
        needs.num_skipped =
            std::clamp<int64_t>(group.first_needed_block(skip_for) - size, 0, needs.num_new);
        needs.num_new -= needs.num_skipped;
      }
      needs.drop_to = std::max(each.num_dropped, std::min(group.first_needed_block(start), size));
      // Blocks that leave a window make room for what comes, unless a step may still read them.
      for (int64_t b = each.num_dropped; b < needs.drop_to && on.frees_at_once; ++b) {
        num_free += on.pool->ref_count(each[b]) == 1;
      }
    } else if (group.is_circular()) {
      const int64_t most = std::min(ceil_div(stop, group.block_size), group.max_blocks);
      needs.num_new = std::max<int64_t>(most - size, 0);
      if (may_share) needs.num_shared = num_shared(on.holders, group, each, start, stop);
    }
    num_new += needs.num_new + needs.num_shared;
  }
  const bool fits = num_free - num_new >= supply.num_kept_free;
  const int64_t kept = std::max(supply.num_kept_free, on.watermark_blocks);
  demand.status = fits ? Status::kServed : Status::kWait;
  demand.num_spare = fits ? std::max<int64_t>(num_free - num_new - kept, 0) : 0;
  demand.gives_up = false;
  return demand;
}

}  // namespace

DemandRules::DemandRules(const std::vector<CacheGroup>* groups, const BlockPool* pool,
                         const DeferredFrees* frees, const StepNumbers* steps, BlockHolders holders,
                         const ManagerOptions& options)
    : groups_(groups),
      pool_(pool),
      frees_(frees),
      steps_(steps),
      holders_(holders),
      watermark_blocks_(options.watermark_blocks),
      computes_whole_prompt_(options.computes_whole_prompt) {}

Demand DemandRules::of(const RowBlocks* held, const Span& span, const Supply& supply, bool is_new,
                       bool may_share) const {
  return demand_of({groups_, pool_, holders_, watermark_blocks_, frees_at_once()}, held, span,
                   supply,
                   !is_new                  ? 0
                   : computes_whole_prompt_ ? span.stop
                                            : span.start,
                   may_share, /*gives_up=*/false);
}

Demand DemandRules::with_free(const RowBlocks* held, const Span& span, bool may_share,
                              int64_t num_free, bool gives_up) const {
  return demand_of({groups_, pool_, holders_, watermark_blocks_, frees_at_once()}, held, span,
                   {num_free, 0}, /*skip_for=*/0, may_share, gives_up);
}

// Of the blocks that the row can give up, those that are free then. Of states these are the last
// pages but for the one that goes on, and those that others hold and drafts have passed.
int64_t DemandRules::num_freed(const CacheGroup& group, const RowBlocks& held,
                               const Span& span) const {
  const int64_t kept = group.holds_state() ? held.num_dropped + span.num_accepted : held.size();
  int64_t num_left = num_surplus(holders_, group, held, span), n = 0;
  for (int64_t b = held.size() - 1; num_left > 0; --b) {
    if (b == kept) continue;
    if (group.holds_state() && b < kept && (span.start - (kept - b)) % group.block_size == 0 &&
        holders_.is_shared(held[b])) {
      continue;
    }
    n += pool_->ref_count(held[b]) == 1;
    --num_left;
  }
  return n;
}

Demand DemandRules::of_running(const RowBlocks* held, const Span& span, bool may_share,
                               bool gives_up) const {
  Demand demand = with_free(held, span, may_share, pool_->num_free(), /*gives_up=*/false);
  if (demand.status == Status::kServed) return demand;
  int64_t num_blocks = 0, num_freed = 0;
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    num_freed += this->num_freed(group, each, span);
    // Alone, it shares no page: a state goes on in its own.
    num_blocks += group.holds_state() ? 1 + span.num_drafts
                                      : each.size() - num_surplus(holders_, group, each, span) -
                                            demand[group].drop_to + demand[group].num_new;
  }
  if (gives_up && frees_at_once()) {
    demand = with_free(held, span, may_share, pool_->num_free() + num_freed, /*gives_up=*/true);
    if (demand.status == Status::kServed) {
      for (const CacheGroup& group : *groups_) {
        demand[group].num_surplus = num_surplus(holders_, group, held[group.id], span);
      }
      demand.gives_up = true;
      demand.num_spare = 0;  // else it would take the same again
      return demand;
    }
  }
  demand.status = never_or_wait(num_blocks);
  return demand;
}

Demand DemandRules::of_new(const RowBlocks* held, const TokenChain& chain, const Span& span,
                           int64_t num_reserved) const {
  int64_t num_free = pool_->num_free(), num_blocks = 0;
  const bool is_alone = num_free == pool_->num_total();
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    // Hits that are free stop being so when this request takes them: they cannot also be its new
    // ones. Those on the host take a free one.
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      num_free -= stops_being_free(each[b]);
    }
    num_free -= each.source != kNullBlock && pool_->ref_count(each.source) == 0;
    num_blocks += each.num_alive() + (each.source != kNullBlock);
  }
  Demand demand = with_encoder(held, chain, span, {num_free, watermark_blocks_ + num_reserved});
  for (const CacheGroup& group : *groups_) num_blocks += demand[group].num_new;
  if (num_blocks <= pool_->num_total() - watermark_blocks_) return demand;
  // Computed from its first token on, in chunks, it would leave the watermark at its first chunk
  // alone. So it is not refused for what it begins with, and admitted where nothing else is held.
  const bool would_grow = span.start > 0 && !computes_whole_prompt_;
  if (would_grow && is_alone) demand = with_encoder(held, chain, span, {num_free, num_reserved});
  if (!would_grow || num_blocks > pool_->num_total()) demand.status = Status::kNever;
  return demand;
}

// Whether a hit takes a free block: one without references or, on the host (null), a new one.
bool DemandRules::stops_being_free(BlockId id) const {
  return id == kNullBlock || pool_->ref_count(id) == 0;
}

// The demand of a row that begins, and of its encoder.
Demand DemandRules::with_encoder(const RowBlocks* held, const TokenChain& chain, const Span& span,
                                 const Supply& supply) const {
  Supply rest = supply;
  for (const CacheGroup& group : *groups_) {
    if (group.holds_encoder()) rest.num_free -= num_encoder_blocks(group, chain);
  }
  Demand demand = of(held, span, rest, /*is_new=*/true, /*may_share=*/false);
  for (const CacheGroup& group : *groups_) {
    if (group.holds_encoder()) demand[group].num_new = num_encoder_blocks(group, chain);
  }
  return demand;
}

bool DemandRules::shares_from(const RowBlocks* held, int64_t start) const {
  for (const CacheGroup& group : *groups_) {
    if (group.holds_encoder()) continue;
    const RowBlocks& each = held[group.id];
    if (group.holds_state()) {
      if (each.num_alive() > 0 && holders_.is_shared(each[each.num_dropped])) return true;
      continue;
    }
    const int64_t stop = each.size() * group.block_size;
    const int64_t from = group.is_circular() ? 0 : start;  // any of its blocks is written again
    if (num_shared(holders_, group, each, from, stop) > 0) return true;
  }
  return false;
}

Status DemandRules::of_whole(const RowBlocks* held, const TokenChain& chain, const Span& first,
                             int64_t num_tokens, const Demand& demand) const {
  // What is kept free for others, and what a hit inside a block is copied from, is there for the
  // chunks behind the first. So are the hit's blocks that these do not read any more.
  int64_t room = pool_->num_free(), most = 0, most_new = 0;
  std::array<int64_t, kMaxGroups> first_held;  // of the hit's blocks, by group
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    if (group.holds_encoder()) room -= num_encoder_blocks(group, chain);
    first_held[group.id] = each.num_dropped;
  }
  int64_t num_hits = 0;  // blocks of the hit that were free, and that this chunk holds
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    for (int64_t b = each.num_dropped; b < each.size(); ++b) num_hits += stops_being_free(each[b]);
  }
  for (Span span = first;; span = {span.stop, span.stop + num_tokens, first.lookahead}) {
    span.stop = std::min(span.stop, chain.num_tokens());
    int64_t num_held = 0, num_new = 0;
    const auto leave_hits = [&](const CacheGroup& group, int64_t stop) {
      int64_t& b = first_held[group.id];
      for (; b < stop; ++b) num_hits -= stops_being_free(held[group.id][b]);
    };
    for (const CacheGroup& group : *groups_) {
      const RowBlocks& each = held[group.id];
      if (group.holds_encoder()) {
        num_held += num_encoder_blocks(group, chain);
      } else if (group.holds_state()) {
        // Behind the first chunk it goes on in place where no page is free.
        const bool begins = span.start == first.start;
        if (!begins) leave_hits(group, each.size());
        const int64_t num_before = begins ? each.num_alive() : 1;
        const int64_t num_more = (begins && span.moves_state(group, num_before > 0)) +
                                 std::min(first.lookahead, group.num_speculative);
        num_held += num_before + num_more;
        num_new += !begins + num_more;
      } else {
        const int64_t stop =
            std::min(ceil_div(span.stop + span.lookahead, group.block_size), group.max_blocks);
        // Columns of the hit that are null stay so.
        const int64_t needed =
            group.is_circular() ? 0
                                : std::max(group.first_needed_block(span.start), each.num_dropped);
        leave_hits(group, std::min(needed, each.size()));
        num_held += std::max<int64_t>(stop - needed, 0);
        num_new += std::max<int64_t>(stop - std::max(needed, each.size()), 0);
      }
    }
    most = std::max(most, num_held);
    most_new = std::max(most_new, num_hits + num_new);
    if (span.stop == chain.num_tokens()) break;
  }
  if (demand.status == Status::kNever || most > pool_->num_total()) return Status::kNever;
  return demand.status == Status::kServed && most_new <= room ? Status::kServed : Status::kWait;
}

}  // namespace kvcache
