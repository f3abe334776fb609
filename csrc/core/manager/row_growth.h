// SPDX-License-Identifier: Apache-2.0
// Assigns blocks to rows: cache hits, new blocks, and copies of shared blocks.
//
// Applies a Demand that fits to the blocks of the row, the plan and the journal. Invariant: a row
// holds exactly the blocks that were assigned to it and that it has not released. Between steps, no
// state is about to leave its page.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/rules/effects.h"
#include "core/manager/demand.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/row_context.h"

namespace kvcache {

// A state page that its row releases after all rows of the step have been served.
struct LeftState {
  int32_t row;
  uint8_t group;
  BlockId page;
  int64_t num_tokens;   // tokens that the state summarizes
  int64_t first_token;  // first token that depends on this state
};

class RowGrowth final : public Growth {
 public:
  explicit RowGrowth(const RowContext& context) : c_(context), holders_(context) {}

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
  const std::vector<LeftState>& left_states() const { return left_states_; }
  // `engine_copies`: the engine copies from the pages, so they are kept until the last issued step
  // is done.
  void release_left_states(bool engine_copies = false);

  // For page rules.
  RowBlocks& held(int32_t row, const CacheGroup& group) const override {
    return c_.held(row, group);
  }
  bool is_shared(BlockId id) const override { return holders_.is_shared(id); }
  bool is_step() const override { return c_.plan->is_step(); }
  void replace(int32_t row, const CacheGroup& group, int64_t column, BlockId id) override {
    c_.plan->replace(row, group.id, column, id);
  }
  void copy(BlockId source, BlockId target) override { c_.plan->copy(source, target); }
  void zero(BlockId page) override { c_.plan->zero(page); }
  void onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
               BlockId block, bool is_hit) override;
  void replace_shared(ServedRow* served, const CacheGroup& group, int64_t column, BlockId own,
                      bool copies) override;
  void copy_source(ServedRow* served, const CacheGroup& group, BlockId own) override;
  void note_dropped(int32_t row, const CacheGroup& group, int64_t column, BlockId id) override {
    c_.note_dropped(row, group, column, id);
  }
  void release(int32_t row, const std::vector<BlockId>& ids) override { c_.release(row, ids); }
  void leave(int32_t row, const CacheGroup& group, int64_t column, BlockId page,
             int64_t num_tokens) override {
    left_states_.push_back(
        {row, group.id, page, num_tokens, c_.rows->first_token(row, group, column)});
  }
  void evict(BlockId id) override { c_.pool->evict(&id, 1); }

 private:
  void note_hits(const Blocks& blocks) {
    if (blocks.n == 0) return;
    c_.pool->notify(Hit{blocks, Hit::By::kRequest});
  }
  void take_hit_on_host(int32_t row, const CacheGroup& group, const PrefixHit& hit);
  void onboard_hit(ServedRow* served, const PrefixHit& hit);
  void give_up(ServedRow* served, const Demand& demand);

  RowContext c_;
  BlockHolders holders_;
  std::vector<LeftState> left_states_;
  std::vector<BlockId> taken_;  // scratch: the blocks of one row
};

}  // namespace kvcache
