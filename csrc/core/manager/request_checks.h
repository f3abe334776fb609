// SPDX-License-Identifier: Apache-2.0
// Rejects invalid requests before anything changes.
//
// Invariant: changes nothing except the record of the rows named in the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/groups/rules/engine_state.h"
#include "core/groups/rules/page_rules.h"
#include "core/hashing/token_chain.h"
#include "core/manager/options.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/step_request.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// All functions throw std::invalid_argument with the argument, the value and the expected value.
class RequestChecks {
 public:
  RequestChecks(const ManagerSetup* setup, const RowContext& context)
      : setup_(setup),
        c_(context),
        has_state_(has_states(setup->groups)),
        max_drafts_(max_drafts(setup->groups)),
        has_engine_state_(has_engine_states(setup->groups)),
        has_bound_(has_bound(setup->groups)) {}

  void check_group(int64_t group) const {
    const auto num_groups = static_cast<int64_t>(setup_->groups.size());
    if (group >= 0 && group < num_groups) return;
    throw_invalid("group is ", group, ": expected 0 to ", num_groups - 1);
  }
  void check_length(int64_t num_total, const char* what) const {
    const int64_t most = setup_->options.max_model_len;
    if (num_total <= most) return;
    throw_invalid(what, " would have ", num_total,
                  " tokens: expected at most max_model_len, which is ", most);
  }
  // Checks that the row is driven by `step` or, if not by_step, by a caller that maintains its own
  // tables. Returns the row.
  const Row& check_driver(int32_t row, bool by_step) const {
    const Row& r = c_.rows->at(row);
    if (r.by_step() == by_step) return r;
    throw_invalid(
        "row ", row, " was admitted by ",
        by_step ? "admit: expected extend to serve it" : "step: expected it in the rows of step");
  }
  void check_not_receiving(int32_t row) const {
    if (!c_.row(row).is_receiving()) return;
    throw_invalid("row ", row,
                  " is receiving external tokens: expected a call to finish_receiving first");
  }
  // For circular buffers, checks that num_slots slots from token `start` on, including lookahead,
  // do not overwrite tokens that the step reads. `what` describes the request in errors.
  void check_places(int64_t start, int64_t num_slots, const char* what) const;
  // The same for a row whose last step may have been shorter than planned. With states of drafts,
  // it was not: its result is known, or a swap-out has accepted the drafts.
  void check_row_places(const Row& r, int64_t start, int64_t num_slots, int64_t num_ids) const {
    const int64_t num_undecided = max_drafts_ > 0 ? 0 : r.num_undecided(start, num_ids);
    check_places(start - num_undecided, num_slots + num_undecided, "a row");
  }
  // The same for the tokens of a request after its external tokens, which end at `start`. If the
  // external tokens do not all fit, only as many as fit are received, taken from the end.
  void check_new_places(const NewRow& asked, int64_t start) const {
    const int64_t num_tokens = std::min(asked.num_tokens, asked.chain->num_tokens() - start);
    check_places(start, num_tokens + asked.num_lookahead, "a new request");
  }
  // Checks that a running row with num_known known tokens does not have more drafts than kept
  // states.
  void check_drafts(int32_t row, int64_t start, int64_t num_tokens, int64_t num_known) const {
    const int64_t num_sure = std::max(start + 1, num_known) - start;
    if (max_drafts_ == 0 || num_tokens <= num_sure + max_drafts_) return;
    throw_invalid("num_tokens of row ", row, " is ", num_tokens, ": expected at most ",
                  num_sure + max_drafts_, ": ", num_sure, " known or sampled tokens and ",
                  max_drafts_, " drafts (num_speculative_blocks)");
  }
  void check_has_no_state(const char* call) const {
    if (!has_state_) return;
    throw_invalid(
        call,
        " cannot return the required copies of states: expected step for a manager with a "
        "recurrent group");
  }
  // The tables of such groups depend on the engine's own copies, which plans do not contain.
  void check_has_no_engine_state() const {
    if (!has_engine_state_) return;
    throw_invalid(
        "step cannot serve groups with num_speculative_blocks if engine_copies_states is set: "
        "expected admit and advance");
  }
  void check_has_host(const char* what) const {
    if (c_.host != nullptr) return;
    throw_invalid(what, ", but there is no host tier: expected num_host_blocks of 2 or more");
  }
  void check_on_device(int32_t row) const {
    if (!c_.rows->at(row).is_on_host()) return;
    throw_invalid("row ", row, " is swapped out: expected one on the device");
  }
  void check_ids(const std::vector<BlockId>& ids, const char* name) const {
    for (BlockId id : ids) c_.pool->check_id(id, name);
  }

  void check_new(const TokenChain& chain, int64_t least_tokens = 1) const {
    checked_size("the number of tokens of a new request", chain.num_tokens(), least_tokens);
    check_length(chain.num_tokens(), "a new request");
    if (chain.block_size() == c_.hash_block_size) return;
    throw_invalid("a request with hashes for block_size ", chain.block_size(),
                  " was passed to a manager with block_size ", c_.hash_block_size);
  }
  // Checks the numbers of tokens and blocks in a request for a new row.
  void check_counts(const NewRow& asked) const;
  void check_external_counts(const NewRow& asked) const;
  // Checks that a row can go back by this many tokens. Known tokens can only be computed again.
  void check_rejected(int32_t row, int64_t num_rejected) const;
  // Checks that a row can go back by this many tokens, all of which are drafts.
  void check_only_drafts(int32_t row, int64_t num_rejected) const {
    if (num_rejected == 0) return;
    check_rejected(row, num_rejected);
    const Row& r = c_.row(row);
    const int64_t num_unknown = std::max<int64_t>(r.num_computed - r.num_known, 0);
    if (num_rejected <= num_unknown) return;
    throw_invalid("num_rejected_tokens of row ", row, " is ", num_rejected, ": expected at most ",
                  num_unknown, ", its drafts: tokens that were not known when it was last served");
  }
  // Checks the request for one row outside of a step.
  void check_ask(const RowAsk& ask) const;
  // Checks the external tokens that follow a hit of num_hit tokens. `ends_inside`: the hit ends
  // inside a block.
  void check_external(const NewRow& asked, int64_t num_hit, bool ends_inside) const;
  void check_receive(int32_t row, int64_t num_tokens) const {
    const Row& r = c_.rows->at(row);
    if (!r.is_receiving()) {
      throw_invalid(
          "row ", row,
          " is not receiving: expected a request that was admitted with external.delayed");
    }
    const int64_t most = r.num_computed - c_.rows->info(row).num_hit;
    if (num_tokens >= 0 && num_tokens <= most) return;
    throw_invalid("num_tokens is ", num_tokens, ": expected 0 to ", most,
                  ", the external tokens of the request");
  }
  void check_kept(const std::string& name) const {
    if (c_.frees->keeps(name)) return;
    throw_invalid("no blocks of request '", name,
                  "' are kept: expected a request that was freed with keep_blocks");
  }
  void check_holdable(const BlockId* ids, int64_t n) const;
  // Checks that connectors hold these blocks, repeated ids as often as they are listed.
  void check_holds(const BlockId* ids, int64_t n) const;
  void check_fork(int32_t row, const TokenChain& child) const;
  void check_swap(const std::vector<int32_t>& rows, bool on_host) const {
    c_.rows->begin_call();
    for (int32_t row : rows) {
      check_driver(row, /*by_step=*/false);
      if (!on_host) {
        check_on_device(row);
      } else if (!c_.row(row).is_on_host()) {
        throw_invalid("row ", row, " is on the device: expected one that is swapped out");
      }
      check_not_receiving(row);
      check_once(row);
    }
  }
  void check_leaving(const int32_t* rows, int64_t n, const KeptNames& kept) const {
    c_.rows->begin_call();
    for (int64_t i = 0; i < n; ++i) {
      const Row& r = c_.rows->at(rows[i]);
      if (!kept.empty()) {
        check_keeps(rows[i], kept[static_cast<size_t>(i)]);
      } else if (r.is_receiving()) {
        throw_invalid("row ", rows[i],
                      " is receiving external tokens: expected a call to finish_receiving first, "
                      "or keep_blocks");
      }
      if (c_.rows->name(rows[i])) continue;
      throw_invalid("row ", rows[i], " would be freed twice: expected each row once");
    }
  }
  // Returns the number of tokens in these blocks, which the caller has looked up.
  int64_t check_computed(const TokenChain& chain, const std::vector<std::vector<BlockId>>& computed,
                         bool reads = true) const;
  void check_step(const StepRequest& request) const;
  void check_report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                    const std::vector<BlockId>& failed_on_host) const {
    c_.journal->check_step_id(step_id);
    check_ids(failed, "failed_pages");
    if (!failed_on_host.empty()) check_has_host("failed_host_pages contains pages");
    for (BlockId page : failed_on_host) c_.host->pages().check_id(page, "failed_host_pages");
    if (!completed) c_.journal->check_may_abort(step_id);
  }

 private:
  // For states, checks that all drafts of the row's last step are rejected or known, because the
  // next step continues from the state after the last accepted token. `num_ids`: new known tokens.
  void check_decided(int32_t row, int64_t num_rejected, int64_t num_ids) const {
    const Row& r = c_.row(row);
    const int64_t num_left = r.num_drafts_after(num_rejected);
    const int64_t num_missing = r.num_computed - num_rejected - r.chain->num_tokens() - num_ids;
    if (num_left == 0 || num_missing <= 0) return;
    throw_invalid(
        "row ", row, " has ", num_left,
        " drafts of its last step that are neither rejected nor known: expected "
        "num_rejected_tokens and the token_ids of accepted drafts before the next step, because "
        "a recurrent state continues after the last accepted token");
  }
  // Checks that a call names the row only once.
  void check_once(int32_t row) const {
    if (!c_.rows->name(row)) throw_invalid("rows contains row ", row, " twice");
  }
  // Checks that n ids can be appended. The last of them may be sampled without ever being computed,
  // so it is not counted.
  void check_longer(const TokenChain& chain, int64_t n) const {
    if (n > 0) check_length(chain.num_tokens() + n - 1, "a request");
  }
  static void check_not_negative(const TokenChain& chain, const int32_t* ids, int64_t first,
                                 int64_t stop) {
    for (int64_t i = first; i < stop && !chain.takes_placeholders(); ++i) {
      if (ids[i] < 0) TokenIds::fail_negative(i, ids[i]);
    }
  }
  // The end of the last block of the row, or part of a block, that is published or never will be.
  int64_t num_cached(int32_t row) const {
    int64_t num_tokens = 0;
    for (const CacheGroup& group : setup_->groups) {
      if (!group.is_cached) continue;
      const RowBlocks& held = c_.held(row, group);
      num_tokens = std::max(num_tokens, held.num_published * group.block_size);
      if (!group.has_partial) continue;
      num_tokens = std::max(num_tokens, held.num_partial * c_.hash_block_size);
    }
    return num_tokens;
  }
  int64_t check_covered(const std::vector<std::vector<BlockId>>& computed) const;
  void check_contain(const TokenChain& chain, const CacheGroup& group,
                     const std::vector<BlockId>& ids, int64_t first) const;
  void check_start(const RowAsk& ask) const;
  // Checks that the blocks of the row can be kept under this name.
  void check_keeps(int32_t row, const std::string& name) const {
    check_on_device(row);
    if (!c_.frees->keeps(name)) return;
    throw_invalid("blocks of request '", name,
                  "' are already kept: expected a call to release_blocks first");
  }
  void check_step_row(const StepRequest& request, int64_t i) const;
  void check_step_pages(const StepRequest& request, int64_t i, int64_t start) const;
  void check_leaves_device(const StepRequest& request) const;
  void check_token_ids(const StepRequest& request) const;

  const ManagerSetup* setup_;
  RowContext c_;
  bool has_state_;         // whether a group updates pages in place
  int64_t max_drafts_;     // maximum per step and row
  bool has_engine_state_;  // whether the engine keeps states of drafts in their columns
  bool has_bound_;         // whether a group has circular buffers
};

}  // namespace kvcache
