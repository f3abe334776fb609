// Gives rows their blocks: hits from the cache, new ones, their own in place of shared ones.
//
// Carries out what a Demand found to be possible, into the row's blocks, the plan and the journal.
// Invariant: a row's blocks, and nothing else, are what it was given and has not released; between
// steps no state is on the move.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/block_holders.h"
#include "core/manager/demand.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/row_context.h"

namespace kvcache {

// A row that is being served.
struct ServedRow {
  int32_t row;
  Span span;
  int64_t safe_start;                          // tokens before it do not depend on this step
  std::array<int64_t, kMaxGroups> num_before;  // blocks per group that the worker knows

  void depends_from(int64_t token) {
    if (token < safe_start) safe_start = token;
  }
};

class RowGrowth {
 public:
  struct LeftState {  // a page of a recurrent state that its row leaves, when all rows are served
    int32_t row;
    uint8_t group;
    BlockId page;
    int64_t num_tokens;   // that the state is of
    int64_t first_token;  // that it has a part in
  };

  RowGrowth(const RowContext& context, BlockHolders holders) : c_(context), holders_(holders) {}

  // The blocks with which a request begins that takes this hit and goes on at token `start`: what
  // lies between comes from elsewhere. Changes nothing but `held`.
  static void set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit,
                      int64_t start);

  // The row, which begins with the hit's blocks, takes a reference of each.
  void take_hit(ServedRow* served, const PrefixHit& hit);

  // Drops what the row does not read any more or can do without, and gives it what it demands.
  void serve(ServedRow* served, const Demand& demand);

  // The state of a row, which goes on at token span.start, is again in the first of its pages:
  // those of drafts that were accepted before are spare ones or, where they hold states at the ends
  // of blocks and these are kept, or others hold them, left.
  void settle_state(int32_t row, const CacheGroup& group, const Span& span, bool keeps_passed);

  // Pages that are left behind by the step that is being made.
  const std::vector<LeftState>& left_states() const { return left_states_; }
  // `engine_copies`: from them, until the step that was issued last is over.
  void release_left_states(bool engine_copies = false);

 private:
  void note_hits(const BlockId* ids, int64_t n);
  void take_hit_on_host(int32_t row, const CacheGroup& group, const PrefixHit& hit);
  void onboard_hit(ServedRow* served, const PrefixHit& hit);
  void onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
               BlockId block, bool is_hit);
  void give_up(ServedRow* served, const Demand& demand);
  void drop(int32_t row, const CacheGroup& group, int64_t drop_to);
  const BlockId* copy_on_write(ServedRow* served, const CacheGroup& group, int64_t num_shared,
                               const BlockId* own);
  struct StateDemand {
    int64_t num_new, num_shared;
    bool moves;
  };
  const BlockId* serve_state(ServedRow* served, const CacheGroup& group, const StateDemand& needs,
                             const BlockId* own);
  void move_state(ServedRow* served, const CacheGroup& group, BlockId page);
  void replace_changed(int32_t row, const CacheGroup& group, int64_t first);
  void clear_uncomputed(ServedRow* served, const CacheGroup& group, const BlockId* blocks,
                        int64_t n);
  void copy_source(ServedRow* served, const CacheGroup& group);

  RowContext c_;
  BlockHolders holders_;
  std::vector<LeftState> left_states_;
  std::vector<BlockId> taken_;         // memory for the blocks of one row
  std::vector<BlockId> pages_before_;  // and for its pages of states, as tables have them
};

}  // namespace kvcache
