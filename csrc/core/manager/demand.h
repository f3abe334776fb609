// SPDX-License-Identifier: Apache-2.0
// Computes the blocks that a row needs to be served.
//
// Invariant: all calls are read-only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/groups/cache_group.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"
#include "core/groups/rules/tokens.h"
#include "core/hashing/token_chain.h"
#include "core/manager/options.h"
#include "core/manager/row_context.h"
#include "core/manager/step_plan.h"
#include "core/manager/step_request.h"
#include "core/pool/block_pool.h"

namespace kvcache {

struct Demand {
  Status status;
  int64_t num_spare;  // free blocks, beyond the demand, that preallocation may use
  bool gives_up;      // whether the row releases surplus blocks and kept states
  std::array<GroupDemand, kMaxGroups> groups;  // one entry per group of the manager

  GroupDemand& operator[](const CacheGroup& group) { return groups[group.id]; }
  const GroupDemand& operator[](const CacheGroup& group) const { return groups[group.id]; }
};

struct Supply {
  int64_t num_free;
  int64_t num_kept_free;  // blocks that must remain free
};

class DemandRules {
 public:
  DemandRules(const RowContext& context, const ManagerOptions& options)
      : c_(context), holders_(context), watermark_blocks_(options.watermark_blocks) {}

  // The demand of a row on the device. `may_share`: other rows may hold blocks that it writes.
  // `gives_up`: if the row does not fit, it releases its blocks that contain no slot of the span,
  // and its pages with states after earlier drafts.
  Demand of_running(const RowBlocks* held_by_group, const Span& span, bool may_share,
                    bool gives_up = false) const {
    Demand demand =
        with_free(held_by_group, span, may_share, c_.pool->num_free(), /*gives_up=*/false);
    if (demand.status == Status::kServed) return demand;
    int64_t num_blocks = 0, num_freed = 0;
    std::array<int64_t, kMaxGroups> num_surplus;
    for (const CacheGroup& group : *c_.groups) {
      const PageRules::LeastDemand least =
          group.rules->least_demand(basis(), group, held_by_group[group.id], span, demand[group]);
      num_surplus[group.id] = least.num_surplus;
      num_freed += least.num_freed;
      num_blocks += least.num_blocks;
    }
    if (gives_up && frees_at_once()) {
      demand = with_free(held_by_group, span, may_share, c_.pool->num_free() + num_freed,
                         /*gives_up=*/true);
      if (demand.status == Status::kServed) {
        for (const CacheGroup& group : *c_.groups)
          demand[group].num_surplus = num_surplus[group.id];
        demand.gives_up = true;
        demand.num_spare = 0;  // so that these blocks are not used twice
        return demand;
      }
    }
    demand.status = never_or_wait(num_blocks, span);
    return demand;
  }

  // Returns the demand of a request that would start with these blocks. Null blocks after the first
  // num_dropped stand for host blocks to onboard.
  Demand of_new(const RowBlocks* held_by_group, const NewRow& asked, const Span& span) const {
    const int64_t num_total = c_.pool->num_total(), num_reserved = asked.num_reserved_blocks;
    int64_t num_free = c_.pool->num_free(), num_blocks = 0;
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = held_by_group[group.id];
      const bool has_source = held.source != kNullBlock;
      num_blocks += held.num_alive() + has_source;
      num_free -= num_taken(held, held.num_dropped, held.size());
      num_free -= has_source && c_.pool->ref_count(held.source) == 0;
    }
    Demand demand =
        with_upfront(held_by_group, asked, span, {num_free, watermark_blocks_ + num_reserved});
    for (const CacheGroup& group : *c_.groups) num_blocks += demand[group].num_new;
    if (num_blocks <= num_total - watermark_blocks_) return demand;
    // Without the hit, the request would be computed in chunks, and only its first chunk would
    // respect the watermark. A large hit must therefore not cause a rejection: the request is
    // admitted if nothing else is held.
    const bool would_grow = span.start > 0 && !asked.computes_whole;
    if (!would_grow || num_blocks > num_total) {
      demand.status = Status::kNever;
    } else if (c_.pool->num_free() == num_total) {
      demand = with_upfront(held_by_group, asked, span, {num_free, num_reserved});
    }
    return demand;
  }

  // Returns whether a request whose first chunk has this demand can be computed completely with the
  // free blocks, with all blocks of the pool, or never. Each later chunk has num_tokens tokens.
  Status of_whole(const RowBlocks* held_by_group, const TokenChain& chain, const Span& first,
                  int64_t num_tokens, const Demand& demand) const {
    const int64_t upfront = num_upfront(chain);
    const Peak peak = peak_of_chunks(held_by_group, chain, first, num_tokens);
    const bool never_fits = upfront + peak.num_held > c_.pool->num_total();
    if (demand.status == Status::kNever || never_fits) return Status::kNever;
    // Later chunks can use the blocks that are kept free for other requests, the source block of a
    // hit that ends inside a block, and blocks of the hit that are no longer read.
    const bool fits = upfront + peak.num_taken <= c_.pool->num_free();
    return demand.status == Status::kServed && fits ? Status::kServed : Status::kWait;
  }

  // The demand of a row that starts or returns with these blocks, considering only the number of
  // blocks. `skip_for`: see DemandFor.
  Demand of(const RowBlocks* held_by_group, const Span& span, const Supply& supply,
            int64_t skip_for) const {
    return demand_of(held_by_group, {span, skip_for, /*may_share=*/false, /*gives_up=*/false},
                     supply);
  }

  // Whether other rows hold a block in which token `start` or later tokens may be written.
  bool shares_from(const RowBlocks* held_by_group, int64_t start) const {
    return std::any_of(c_.groups->begin(), c_.groups->end(), [&](const CacheGroup& group) {
      return group.rules->shares_from(holders_, group, held_by_group[group.id], start);
    });
  }

  int64_t watermark_blocks() const { return watermark_blocks_; }
  // Returns whether a row of num_blocks blocks that does not fit now can ever fit. A row with
  // undecided drafts may need fewer blocks once they are decided.
  Status never_or_wait(int64_t num_blocks, const Span& span) const {
    const bool may_shrink = span.num_undecided > 0;
    return num_blocks > c_.pool->num_total() && !may_shrink ? Status::kNever : Status::kWait;
  }

 private:
  // Inlined, because it runs for every row of a step and most arguments are constants at the call.
  [[gnu::always_inline]] Demand demand_of(const RowBlocks* held_by_group, const DemandFor& asked,
                                          const Supply& supply) const {
    Demand demand;
    const DemandBasis on = basis();
    int64_t num_new = 0, num_free = supply.num_free;
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = held_by_group[group.id];
      GroupDemand& needs = demand[group];  // a reference, because copying would stall on each store
      needs = {0, held.num_dropped, 0, 0, 0, false};
      with_rules(group, [&](const auto& rules) __attribute__((always_inline)) {
        rules.demand(on, group, held, asked, &needs, &num_free);
      });
      num_new += needs.num_new + needs.num_shared;
    }
    const bool fits = num_free - num_new >= supply.num_kept_free;
    const int64_t kept = std::max(supply.num_kept_free, watermark_blocks_);
    demand.status = fits ? Status::kServed : Status::kWait;
    demand.num_spare = fits ? std::max<int64_t>(num_free - num_new - kept, 0) : 0;
    demand.gives_up = false;
    return demand;
  }
  Demand with_free(const RowBlocks* held_by_group, const Span& span, bool may_share,
                   int64_t num_free, bool gives_up) const {
    return demand_of(held_by_group, {span, /*skip_for=*/0, may_share, gives_up}, {num_free, 0});
  }
  // Returns how many of these blocks of a hit are no longer free once a request takes them: blocks
  // without references, and blocks on the host (null), which are loaded into free blocks.
  int64_t num_taken(const RowBlocks& held, int64_t first, int64_t stop) const {
    int64_t n = 0;
    for (int64_t b = first; b < stop; ++b) {
      n += held[b] == kNullBlock || c_.pool->ref_count(held[b]) == 0;
    }
    return n;
  }
  // The demand of a new row, including the blocks allocated at admission.
  Demand with_upfront(const RowBlocks* held_by_group, const NewRow& asked, const Span& span,
                      const Supply& supply) const {
    const TokenChain& chain = *asked.chain;
    Demand demand =
        of(held_by_group, span, {supply.num_free - num_upfront(chain), supply.num_kept_free},
           /*skip_for=*/asked.computes_whole ? span.stop : span.start);
    for (const CacheGroup& group : *c_.groups) {
      demand[group].num_new += group.rules->num_upfront(group, chain);
    }
    return demand;
  }
  // Blocks allocated at admission.
  int64_t num_upfront(const TokenChain& chain) const {
    int64_t n = 0;
    for (const CacheGroup& group : *c_.groups) n += group.rules->num_upfront(group, chain);
    return n;
  }
  // The largest numbers of blocks, over all chunks of a prompt, that the row holds, and that are no
  // longer free. Without the blocks allocated at admission.
  struct Peak {
    int64_t num_held, num_taken;
  };
  Peak peak_of_chunks(const RowBlocks* held_by_group, const TokenChain& chain, const Span& first,
                      int64_t num_tokens) const {
    Chunks chunks{held_by_group, first, 0, {}};
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& held = held_by_group[group.id];
      chunks.num_dropped[group.id] = held.num_dropped;
      chunks.num_hits_taken += num_taken(held, held.num_dropped, held.size());
    }
    Span span = first;
    span.stop = std::min(span.stop, chain.num_tokens());
    Peak peak = after_chunk(span, &chunks);
    while (span.stop < chain.num_tokens()) {
      const int64_t stop = std::min(span.stop + num_tokens, chain.num_tokens());
      span = {span.stop, stop, first.lookahead};
      const Peak after = after_chunk(span, &chunks);
      peak = {std::max(peak.num_held, after.num_held), std::max(peak.num_taken, after.num_taken)};
    }
    return peak;
  }
  // The hit with which a prompt starts, while its chunks are simulated.
  struct Chunks {
    const RowBlocks* hit_by_group;
    Span first;
    int64_t num_hits_taken;  // blocks of the hit that were free and that the row still holds
    std::array<int64_t, kMaxGroups> num_dropped;  // leading blocks of the hit, by group
  };
  // Returns the numbers of blocks after the next chunk.
  Peak after_chunk(const Span& span, Chunks* chunks) const {
    int64_t num_held = 0, num_new = 0;
    for (const CacheGroup& group : *c_.groups) {
      const RowBlocks& hit = chunks->hit_by_group[group.id];
      const PageRules::ChunkDemand chunk =
          group.rules->chunk_demand(group, hit, chunks->first, span);
      int64_t& num_dropped = chunks->num_dropped[group.id];
      chunks->num_hits_taken -= num_taken(hit, num_dropped, chunk.num_dropped);
      num_dropped = std::max(num_dropped, chunk.num_dropped);
      num_held += chunk.num_held;
      num_new += chunk.num_new;
    }
    return {num_held, chunks->num_hits_taken + num_new};
  }
  DemandBasis basis() const { return {c_.pool, &holders_, frees_at_once()}; }
  // Whether blocks that a row drops are free immediately, because no step can still read them.
  bool frees_at_once() const { return !c_.frees->defers(c_.journal->numbers().last_issued); }

  RowContext c_;
  BlockHolders holders_;
  int64_t watermark_blocks_;
};

}  // namespace kvcache
