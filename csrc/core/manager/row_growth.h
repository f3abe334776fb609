// Gives rows their blocks: cache hits, new blocks, and own copies of shared blocks.
//
// Applies a Demand that fits to the blocks of the row, the plan and the journal.
// Invariant: a row holds exactly the blocks that it was given and has not released; between steps,
// no state is about to leave its page.
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

  // Sets the blocks with which a request starts that takes this hit and continues at token `start`.
  // Tokens between the hit and `start` come from elsewhere. Changes only `held`.
  static void set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit,
                      int64_t start);

  // The row, which starts with the blocks of the hit, takes a reference to each.
  void take_hit(ServedRow* served, const PrefixHit& hit);

  // Drops the blocks that the row no longer reads or gives up, and allocates its demand.
  void serve(ServedRow* served, const Demand& demand);

  // Makes the drafts of the row's last step final: the row continues at span.start.
  void accept_drafts(int32_t row, const Span& span);

  // Pages that rows leave in the current step.
  const std::vector<LeftState>& left_states() const { return growth_.left_states; }
  // `engine_copies`: the engine copies from the pages, so they wait until the last issued step is
  // done.
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
