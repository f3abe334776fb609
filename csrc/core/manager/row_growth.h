// SPDX-License-Identifier: Apache-2.0
// Assigns blocks to rows: cache hits, new blocks, and copies of shared blocks.
//
// Applies a Demand that fits to the blocks of the row, the plan and the journal. Invariant: a row
// holds exactly the blocks that were assigned to it and that it has not released. Between steps, no
// state is about to leave its page.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/rules/growth.h"
#include "core/manager/block_holders.h"
#include "core/manager/demand.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/row_context.h"

namespace kvcache {

class RowGrowth {
 public:
  RowGrowth(const RowContext& context, BlockHolders holders)
      : c_(context), growth_{context, holders} {}

  // Sets the initial blocks of a request that takes this hit and continues at token `start`. The
  // tokens between the hit and `start` come from another source. Changes only `held`.
  static void set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit,
                      int64_t start);

  // Adds a reference to each block of the hit that is among the row's initial blocks.
  void take_hit(ServedRow* served, const PrefixHit& hit);

  // Drops the blocks that the row no longer reads or that it gives up, and allocates its demand.
  void serve(ServedRow* served, const Demand& demand);

  // Accepts the drafts of the row's last step. The row continues at span.start.
  void accept_drafts(int32_t row, const Span& span);

  // Returns the pages that rows leave in the current step.
  const std::vector<LeftState>& left_states() const { return growth_.left_states; }
  // `engine_copies`: the engine copies from the pages, so they are kept until the last issued step
  // is done.
  void release_left_states(bool engine_copies = false);

 private:
  void note_hits(const BlockId* ids, int64_t n);
  void take_hit_on_host(int32_t row, const CacheGroup& group, const PrefixHit& hit);
  void onboard_hit(ServedRow* served, const PrefixHit& hit);
  void give_up(ServedRow* served, const Demand& demand);

  RowContext c_;
  Growth growth_;
  std::vector<BlockId> taken_;  // scratch: the blocks of one row
};

}  // namespace kvcache
