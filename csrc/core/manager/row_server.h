// SPDX-License-Identifier: Apache-2.0
// Serves rows: allocates the next slots of running rows, admits requests, and forks rows.
//
// DemandRules computes what a row needs. If the demand fits, RowGrowth allocates it, and the
// journal and the plan record it. Invariant: a row that does not fit remains unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/eviction/learned.h"
#include "core/groups/hit_ends.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/demand.h"
#include "core/manager/miss_reasons.h"
#include "core/manager/options.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_growth.h"
#include "core/manager/row_swap.h"
#include "core/manager/step_plan.h"
#include "core/manager/step_request.h"
#include "core/manager/token_intake.h"

namespace kvcache {

class RowServer {
 public:
  struct Parts {
    PrefixFinder* finder;
    const HitEnds* ends;
    Publisher* publisher;
    RowSwap* swap;
    TokenIntake* intake;
    CacheStats* stats;
    MissReasons* misses;  // null: off
    Learned* compared;    // the policy that compares the hits of requests; null: none
  };
  RowServer(const RowContext& context, const Parts& parts, const ManagerOptions& options);

  // Serves the running rows of a step in the given order.
  void serve_rows(const StepRequest& request);
  // Serves the new requests of a step. `external_hits`: lengths of the hits before external tokens,
  // for requests that have external tokens.
  void serve_new(const StepRequest& request, const std::vector<int64_t>& external_hits = {});
  // Called when all rows of the step are served, so that later plans, but not this plan, can hit
  // the blocks that the step computes.
  void publish_served();

  // See Manager. The hashes of the request must be known.
  Status would_fit(const NewRow& asked, bool whole);
  Status would_extend(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) const;

  // Returns the length in tokens of the hit that this request would take if it were admitted now.
  // The hashes of the request must be known.
  int64_t num_hit_tokens(const NewRow& asked) {
    return find_hit(asked, HitChoice::kPartial).num_tokens;
  }

  // Calls outside of steps. `allocate` creates a row with the blocks of this hit, and slots for the
  // tokens after it. For the others, see Manager.
  Slots allocate(const NewRow& asked, const PrefixHit& hit);
  Slots serve(const RowAsk& ask, bool lists_new = true);
  Slots fork(int32_t row, const std::shared_ptr<TokenChain>& chain);

  // Lets a row that has released its blocks continue from its hit in the device cache. Encoder
  // pages on the host stay there until the row is swapped in. `num_had`: see CountedTokens.
  void restart(int32_t row, int64_t num_had);

  // See Manager.
  int64_t num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group) const;

  // Throws std::logic_error if a state that leaves its page has not been processed by the end of a
  // step.
  void check_invariants() const {
    require(growth_.left_states().empty(), "a step has not processed a state that leaves its page");
  }

 private:
  // The kinds of hits that a request may take. A shorter hit may need fewer blocks: without the
  // block in which the hit ends and its copy, or without the page of a state and the page after it.
  enum class HitChoice : uint8_t { kPartial, kWhole, kNone };
  static constexpr HitChoice kHitChoices[] = {HitChoice::kPartial, HitChoice::kWhole,
                                              HitChoice::kNone};

  bool pass_quietly(int32_t row, Row* r, const Span& span);
  void extend_row(int32_t row, const Span& span, const StepRequest& request, int64_t i) {
    ServedRow served{row, span};
    const Status status = extend(&served);
    if (status == Status::kServed) return note_served(served);
    parts_.intake->take_back(request, i);
    c_.plan->refuse(i, status);
  }
  Status extend(ServedRow* served);
  void advance(int32_t row, Row* r, const Span& span);
  Demand bring_back(ServedRow* served);
  // Marks the blocks that the row writes as computed by this row, including blocks that it took
  // over from another row.
  void keep_own_blocks(const ServedRow& served) {
    for (const CacheGroup& group : *c_.groups) {
      const int64_t first_written = group.rules->first_written(group, served.span);
      c_.held(served.row, group).lower_hits(first_written);
    }
  }
  // Accepts the drafts of the row's last step, which are all known tokens.
  void accept_drafts(int32_t row) {
    Row& r = c_.row(row);
    if (r.num_drafts == 0) return;
    growth_.accept_drafts(row, {r.num_computed, 0, 0, 0, r.num_drafts});
    r.num_drafts = 0;
    c_.resend(row);
  }
  Status admit_new(ServedRow* served, const NewRow& asked, int64_t external_hit);
  const PrefixHit& find_hit(const NewRow& asked, HitChoice choice);
  // Whether to retry a request with this status with a shorter hit. Requests with external tokens
  // cannot be retried, because external tokens are counted from the end of the hit.
  static bool tries_less(const NewRow& asked, const PrefixHit& hit, Status status) {
    if (asked.external.num_tokens > 0) return false;
    return status == Status::kWait ? hit.copies_partial()
                                   : status == Status::kNever && hit.num_tokens > 0;
  }
  // The tokens between the end of the hit and the start of the span come from another source.
  static Span span_of(const NewRow& asked, const PrefixHit& hit) {
    const int64_t num_known = asked.chain->num_tokens();
    const int64_t start = hit.num_tokens + asked.external.num_tokens;
    const int64_t stop =
        asked.external.is_delayed ? start : std::min(start + asked.num_tokens, num_known);
    return {start, stop, asked.num_lookahead};
  }
  Span span_of(const Row& r, int64_t num_rejected, int64_t num_tokens, int64_t num_lookahead) const;
  Demand demand_of_new(const NewRow& asked, const PrefixHit& hit, const Span& span);
  void compare_hit(const TokenChain& chain, int64_t num_tokens);
  void count_hit(int32_t row, const PrefixHit& hit) {
    parts_.stats->count(c_.row(row).chain.get(), hit.num_tokens, hit.first_host_token(*c_.groups));
  }
  Status admit(ServedRow* served, const NewRow& asked, const PrefixHit& hit, bool by_step);
  void begin_row(int32_t row, const NewRow& asked, const PrefixHit& hit, bool by_step);
  void note_misses(int32_t row, const NewRow& asked, const PrefixHit& hit) {
    found_.num_taken = hit.num_tokens;
    const bool counts = asked.reads() && !parts_.stats->has_counted(asked.chain.get());
    parts_.misses->note(row, asked, found_, counts);
  }
  void copy_row(int32_t row, int32_t child, const std::shared_ptr<TokenChain>& chain);
  void share_blocks(int32_t row, int32_t child);
  void note_served(const ServedRow& served) {
    c_.journal->note_served(served.row, c_.row(served.row), served.safe_start);
    // The complete table is sent when all rows are served.
    if (c_.plan->must_resend(served.row)) return;
    c_.plan->append(served.row, c_.rows->blocks(served.row), served.num_before.data());
  }
  void publish_left_states() {
    for (const LeftState& left : growth_.left_states()) {
      const CacheGroup& group = (*c_.groups)[left.group];
      group.rules->publish_left(parts_.publisher, left.row, group, left.num_tokens, left.page);
    }
  }
  // Outside of steps, there is no plan. If a hit ends inside blocks, their copies wait until the
  // caller takes them.
  void await_copies() {
    const std::vector<int32_t>& pairs = c_.plan->direct_pairs();
    c_.pool->retain(pairs.data(), static_cast<int64_t>(pairs.size()));
    c_.frees->await_copies(pairs);
    c_.frees->release_or_defer(c_.plan->take_held());
  }
  void publish_direct(int32_t row) {
    if (!growth_.left_states().empty()) {
      publish_left_states();
      growth_.release_left_states(/*engine_copies=*/true);
    }
    parts_.publisher->publish(row);
  }
  // Adds the blocks of the row to `slots`, starting with block from[g] in each group g.
  void add_new_blocks(int32_t row, const int64_t* from, Slots* slots) const {
    for (const CacheGroup& group : *c_.groups) {
      const std::vector<BlockId>& blocks = c_.held(row, group).blocks;
      slots->new_blocks.emplace_back(blocks.begin() + from[group.id], blocks.end());
    }
  }

  RowContext c_;
  Parts parts_;
  BlockHolders holders_;
  DemandRules rules_;
  RowGrowth growth_;
  bool has_bound_;                    // whether a group has a limited number of token slots per row
  int64_t max_drafts_;                // maximum per step and row
  std::vector<RowBlocks> candidate_;  // scratch: blocks of a new request, by group
  MissReasons::Found found_;          // the longest hit of the last new request
};

}  // namespace kvcache
