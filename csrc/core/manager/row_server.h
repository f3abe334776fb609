// Serves rows: running ones get their next slots, requests get a row, forks share one.
//
// Asks DemandRules what a row needs; where it fits, RowGrowth carries it out, the journal notes it
// and the plan says it.
// Invariant: a row that does not fit is answered, and nothing of it has changed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/block_holders.h"
#include "core/manager/cache_stats.h"
#include "core/manager/demand.h"
#include "core/manager/options.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_growth.h"
#include "core/manager/row_swap.h"
#include "core/manager/step_fills.h"
#include "core/manager/step_plan.h"
#include "core/manager/step_request.h"
#include "core/manager/token_intake.h"

namespace kvcache {

class RowServer {
 public:
  struct Parts {
    int64_t hash_block_size;
    BlockHolders holders;
    PrefixFinder* finder;
    Publisher* publisher;
    RowSwap* swap;
    TokenIntake* intake;
    CacheStats* stats;
  };
  RowServer(const RowContext& context, const Parts& parts, const ManagerOptions& options);

  // Within a step: its running rows, then its requests, in the order given.
  void serve_rows(const StepRequest& request);
  // `external_hits`: of requests with external tokens, the hit that these follow.
  void serve_new(const StepRequest& request, const std::vector<int64_t>& external_hits = {});
  // When all rows of the step are served: what a step computes is a hit for later plans only, never
  // within its own.
  void publish_served();

  // Blocks that rows of the step at hand fill, as far as later rows may share them.
  const StepFills& fills() const { return fills_; }

  // The answer that a step would give its only new request now, or to all its known tokens, in
  // chunks of so many. Its hashes must be known.
  Status would_fit(const StepRequest& request, bool whole);
  // The answer that a row would get.
  Status would_extend(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) const;

  // The tokens of the hit that admitting this request would take now. Its hashes must be known.
  int64_t num_hit_tokens(const NewRow& asked) {
    return find_hit(asked, HitChoice::kPartial).num_tokens;
  }

  // Outside of steps. A row with the blocks of this hit and slots for the tokens behind it; slots
  // for num_tokens tokens more in a row; another row that begins with all that `row` has computed,
  // and shares its blocks.
  Slots allocate(const NewRow& asked, const PrefixHit& hit, int64_t num_lookahead_tokens);
  // `lists_new`: whether the answer names the new blocks.
  Slots append(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens,
               bool lists_new = true);
  // Slots for the tokens of the span; those before it are computed, those behind it taken back.
  Slots advance(int32_t row, const Span& span, bool lists_new = true);
  Slots fork(int32_t row, const std::shared_ptr<TokenChain>& child);

  // A row that has released its blocks goes on from what the device's cache has. An encoder's pages
  // that are on the host stay there, and come back with the row.
  void restart(int32_t row);

  // Leading blocks of the row's group that as many rows hold as are running.
  int64_t num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group) const;

  // Throws std::logic_error where a step has left a state on the move.
  void check_invariants() const;

 private:
  // The hits that a request may take. One that ends inside a block takes that block and the copy,
  // one that has a state takes that and the page that goes on from it: without it, less may do.
  enum class HitChoice : uint8_t { kPartial, kWhole, kNone };
  static constexpr HitChoice kHitChoices[] = {HitChoice::kPartial, HitChoice::kWhole,
                                              HitChoice::kNone};

  Status extend(ServedRow* served);
  Demand bring_back(ServedRow* served);
  void keep_own_blocks(const ServedRow& served);
  void accept_drafts(int32_t row);
  Status admit_new(ServedRow* served, const StepRequest& request, size_t i, int64_t external_hit);
  const PrefixHit& find_hit(const NewRow& asked, HitChoice choice);
  static bool tries_less(const NewRow& asked, const PrefixHit& hit, Status status);
  static Span span_of(const NewRow& asked, const PrefixHit& hit, int64_t num_lookahead);
  Span span_of(int32_t row, int64_t num_rejected, int64_t num_tokens, int64_t num_lookahead) const;
  Demand demand_of_new(const TokenChain& chain, const PrefixHit& hit, const Span& span,
                       int64_t num_reserved);
  Status admit(ServedRow* served, const NewRow& asked, const PrefixHit& hit, int64_t num_reserved,
               bool by_step);
  void answer(const ServedRow& served, Status status);
  bool waits_for_earlier(const TokenChain& chain, int64_t num_hit) const;
  bool keeps_states_at(int32_t row, int64_t num_tokens) const;
  void share_filled(int32_t row);
  void publish_left_states();
  void await_copies();               // of a call outside of steps
  void publish_direct(int32_t row);  // of a call outside of steps
  void note_shared(ServedRow* served, const PrefixHit& hit);
  void add_new_blocks(int32_t row, const int64_t* from, Slots* slots) const;

  RowContext c_;
  Parts parts_;
  DemandRules rules_;
  RowGrowth growth_;
  StepFills fills_;
  bool has_state_ = false;            // a group of pages that hold states
  int64_t max_drafts_;                // of a step of a row
  std::vector<RowBlocks> candidate_;  // of a request that asks, by group; memory for the next
};

}  // namespace kvcache
