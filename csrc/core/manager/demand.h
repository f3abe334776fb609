// SPDX-License-Identifier: Apache-2.0
// Computes the blocks that a row needs to be served.
//
// Invariant: all calls are read-only.
#pragma once

#include <array>
#include <cstdint>

#include "core/groups/cache_group.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"
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

  // The demand of a row on the device. If the row does not fit, the status states whether it can
  // ever fit. `may_share`: other rows may hold blocks that it writes. `gives_up`: if the row does
  // not fit, it releases its blocks that contain no slot of the span, and its pages with states
  // after earlier drafts.
  Demand of_running(const RowBlocks* held, const Span& span, bool may_share,
                    bool gives_up = false) const;

  // Returns the demand of a request that would start with these blocks. Null blocks after the first
  // num_dropped stand for host blocks to onboard.
  Demand of_new(const RowBlocks* held, const NewRow& asked, const Span& span) const;

  // Returns whether a request whose first chunk has this demand can be computed completely with the
  // free blocks, with all blocks of the pool, or never. Each later chunk has num_tokens tokens.
  Status of_whole(const RowBlocks* held, const TokenChain& chain, const Span& first,
                  int64_t num_tokens, const Demand& demand) const;

  // The demand of a row that starts or returns with these blocks, considering only the number of
  // blocks. `skip_for`: see DemandFor.
  Demand of(const RowBlocks* held, const Span& span, const Supply& supply, int64_t skip_for) const;

  // Whether other rows hold a block in which token `start` or later tokens may be written.
  bool shares_from(const RowBlocks* held, int64_t start) const {
    return std::any_of(c_.groups->begin(), c_.groups->end(), [&](const CacheGroup& group) {
      return group.rules->shares_from(holders_, group, held[group.id], start);
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
  Demand with_free(const RowBlocks* held, const Span& span, bool may_share, int64_t num_free,
                   bool gives_up) const;
  // Returns how many of these blocks of a hit are no longer free once a request takes them: blocks
  // without references, and blocks on the host (null), which are loaded into free blocks.
  int64_t num_taken(const RowBlocks& each, int64_t first, int64_t stop) const {
    int64_t n = 0;
    for (int64_t b = first; b < stop; ++b) {
      n += each[b] == kNullBlock || c_.pool->ref_count(each[b]) == 0;
    }
    return n;
  }
  Demand with_upfront(const RowBlocks* held, const NewRow& asked, const Span& span,
                      const Supply& supply) const;
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
  Peak peak_of_chunks(const RowBlocks* held, const TokenChain& chain, const Span& first,
                      int64_t num_tokens) const;
  DemandBasis basis() const { return {c_.pool, &holders_, frees_at_once()}; }
  // Whether blocks that a row drops are free immediately, because no step can still read them.
  bool frees_at_once() const { return !c_.frees->defers(c_.journal->numbers().last_issued); }

  RowContext c_;
  BlockHolders holders_;
  int64_t watermark_blocks_;
};

}  // namespace kvcache
