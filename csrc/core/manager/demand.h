// The blocks that a row needs to be served: a question, answered as a value.
//
// Invariant: changes nothing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/block_holders.h"
#include "core/manager/options.h"
#include "core/manager/row_blocks.h"
#include "core/manager/step_plan.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// Tokens start to stop - 1 get slots, and so many lookahead tokens behind them.
struct Span {
  int64_t start, stop, lookahead;
  // Of states: tokens at the end that may be rejected, and those of the step before that were not.
  int64_t num_drafts = 0, num_accepted = 0;

  // The block of a group of states in whose column the first of the row's pages is to lie.
  int64_t state_column(const CacheGroup& group) const {
    return (stop - num_drafts - 1) / group.block_size;
  }
  // Whether the state goes on in a new page: the row has none, or one of an earlier block.
  bool moves_state(const CacheGroup& group, bool has_page) const {
    return !has_page || state_column(group) >= ceil_div(start, group.block_size);
  }
};

struct GroupDemand {
  int64_t num_new;      // blocks behind those that the row has
  int64_t drop_to;      // blocks below it leave
  int64_t num_shared;   // blocks that it writes and others hold: it gets its own
  int64_t num_skipped;  // blocks behind those that it has, that stay null
  int64_t num_surplus;  // blocks at the end that it gives up, as it needs others more
  bool moves;           // of states: the state goes on in a new page, and leaves its own
};

struct Demand {
  Status status;
  int64_t num_spare;  // free blocks beyond those needed that preallocation may take
  bool gives_up;      // what the row can do without: surplus, and states at the ends of blocks
  std::array<GroupDemand, kMaxGroups> groups;  // as many as the manager has

  GroupDemand& operator[](const CacheGroup& group) { return groups[group.id]; }
  const GroupDemand& operator[](const CacheGroup& group) const { return groups[group.id]; }
};

struct Supply {
  int64_t num_free;
  int64_t num_kept_free;  // of these, that the row leaves
};

class DemandRules {
 public:
  DemandRules(const std::vector<CacheGroup>* groups, const BlockPool* pool,
              const DeferredFrees* frees, const StepNumbers* steps, BlockHolders holders,
              const ManagerOptions& options);

  // The demand of a row on the device. Where it does not fit: whether it ever will.
  // `may_share`: others may hold blocks that it writes. `gives_up`: where it does not fit
  // otherwise, blocks that no token of the span has a slot in, and pages of states after earlier
  // drafts, make room for those that one of its groups lacks.
  Demand of_running(const RowBlocks* held, const Span& span, bool may_share,
                    bool gives_up = false) const;

  // The demand of a request that would begin with these blocks; null ones behind num_dropped are to
  // be onboarded. `num_reserved`: blocks that it leaves free besides the watermark.
  Demand of_new(const RowBlocks* held, const TokenChain& chain, const Span& span,
                int64_t num_reserved) const;

  // Whether a request whose first chunk demands that can be computed as a whole: with the blocks
  // that are free now, with all of the pool, or never. Its further chunks have num_tokens tokens.
  Status of_whole(const RowBlocks* held, const TokenChain& chain, const Span& first,
                  int64_t num_tokens, const Demand& demand) const;

  // The blocks alone. `is_new`: nothing is computed yet behind the start.
  Demand of(const RowBlocks* held, const Span& span, const Supply& supply, bool is_new,
            bool may_share) const;

  // Whether others hold a block that may be written behind token `start`.
  bool shares_from(const RowBlocks* held, int64_t start) const;

  int64_t watermark_blocks() const { return watermark_blocks_; }
  Status never_or_wait(int64_t num_blocks) const {  // a row that holds so many, and does not fit
    return num_blocks > pool_->num_total() ? Status::kNever : Status::kWait;
  }

 private:
  Demand with_free(const RowBlocks* held, const Span& span, bool may_share, int64_t num_free,
                   bool gives_up) const;
  int64_t num_freed(const CacheGroup& group, const RowBlocks& held, const Span& span) const;
  bool stops_being_free(BlockId id) const;
  Demand with_encoder(const RowBlocks* held, const TokenChain& chain, const Span& span,
                      const Supply& supply) const;
  // Whether what leaves a row now is free at once, as no step may still read it.
  bool frees_at_once() const { return !frees_->defers(steps_->last_issued); }

  const std::vector<CacheGroup>* groups_;
  const BlockPool* pool_;
  const DeferredFrees* frees_;
  const StepNumbers* steps_;
  BlockHolders holders_;
  int64_t watermark_blocks_;
  bool computes_whole_prompt_;
};

}  // namespace kvcache
