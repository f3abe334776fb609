// SPDX-License-Identifier: Apache-2.0
#include "core/manager/request_checks.h"

#include <optional>
#include <unordered_map>

namespace kvcache {

void RequestChecks::check_places(int64_t start, int64_t num_slots, const char* what) const {
  if (!has_bound_) return;
  const int64_t stop = std::min(start + num_slots, setup_->options.max_model_len);
  for (const CacheGroup& group : setup_->groups) {
    if (group.has_places_for(start, stop)) continue;
    const int64_t num_read = start - group.first_needed_token(start);
    throw_invalid(what, " requests ", num_slots, " slots including lookahead: expected at most ",
                  group.num_places - num_read, ", because group ", group.id, " has space for ",
                  group.num_places, " tokens and reads ", num_read, " of them");
  }
}

void RequestChecks::check_counts(const NewRow& asked) const {
  const ExternalTokens& external = asked.external;
  checked_size("max_host_blocks", asked.max_host_blocks, 0);
  checked_size("num_lookahead_tokens", asked.num_lookahead, 0);
  checked_size("num_reserved_blocks", asked.num_reserved_blocks, 0);
  checked_size("num_prompt_tokens", asked.num_prompt, 0);
  checked_size("num_shared_tokens", asked.num_shared, 0);
  checked_size("external.num_tokens", external.num_tokens, 0);
  check_external_counts(asked);
  if (!external.is_delayed) {
    checked_size("num_tokens", asked.num_tokens, 1);
    return;
  }
  if (external.num_tokens == 0) {
    throw_invalid(
        "external.delayed is True, and external.num_tokens is 0: expected 1 or more tokens");
  }
  if (asked.num_tokens != 0) {
    throw_invalid(
        "num_tokens is ", asked.num_tokens,
        ": expected 0 with external.delayed, because the request computes nothing until its "
        "external tokens have arrived");
  }
}

// Checks that the request may have external tokens, if it has any.
void RequestChecks::check_external_counts(const NewRow& asked) const {
  const int64_t num_tokens = asked.external.num_tokens;
  if (num_tokens == 0) return;
  for (const CacheGroup& group : setup_->groups) {
    if (group.is_transferred || !group.is_cached) continue;
    throw_invalid("external.num_tokens is ", num_tokens, ": expected 0, because group ", group.id,
                  " is cached but not transferred, so it would lack their KV");
  }
  if (asked.reads()) return;
  throw_invalid("external.num_tokens is ", num_tokens,
                ", but the request has read_cache=False: expected 0");
}

void RequestChecks::check_external(const NewRow& asked, int64_t num_hit, bool ends_inside) const {
  const int64_t num_known = asked.chain->num_tokens(), num_external = asked.external.num_tokens;
  if (num_external == 0) return;
  if (ends_inside) {
    throw_invalid("external.num_tokens is ", num_external, " after a hit of ", num_hit,
                  " tokens that ends inside a block: expected computed_blocks of whole blocks "
                  "(whole_blocks=True)");
  }
  if (num_hit + num_external < num_known) return;
  throw_invalid("external.num_tokens is ", num_external, ": expected at most ",
                num_known - 1 - num_hit, ", because the request has ", num_known,
                " tokens, of which ", num_hit, " are cached, and the last token must be computed");
}

void RequestChecks::check_rejected(int32_t row, int64_t num_rejected) const {
  if (num_rejected == 0) return;
  const Row& r = c_.row(row);
  checked_size("num_rejected_tokens", num_rejected, 0);
  const auto fail = [&](const auto&... expected) {
    throw_invalid("num_rejected_tokens of row ", row, " is ", num_rejected, ": expected ",
                  expected...);
  };
  if (has_state_ && max_drafts_ == 0) {
    fail("0, because a recurrent state cannot undo tokens without num_speculative_blocks");
  }
  if (has_state_ && num_rejected > r.num_drafts) {
    fail("at most ", r.num_drafts, ", the drafts of its last step whose states are kept");
  }
  const int64_t num_uncached = r.num_computed - std::max<int64_t>(r.start, num_cached(row));
  if (num_rejected <= num_uncached) return;
  fail("at most ", std::max<int64_t>(num_uncached, 0),
       ", the number of uncached tokens of its last step");
}

int64_t RequestChecks::check_computed(const TokenChain& chain,
                                      const std::vector<std::vector<BlockId>>& computed,
                                      bool reads) const {
  const int64_t num_tokens = check_covered(computed);
  if (num_tokens == 0) return 0;
  size_t most_blocks = 0;
  for (const std::vector<BlockId>& ids : computed) most_blocks = std::max(most_blocks, ids.size());
  const auto fail = [&](const auto&... why) {
    throw_invalid("computed_blocks has ", most_blocks, " blocks", why...);
  };
  if (!setup_->options.enable_caching) fail(", but caching is off (enable_caching=False)");
  if (!reads) fail(", but the request has read_cache=False: expected none");
  const int64_t most_tokens = chain.num_tokens() - 1;
  if (num_tokens > most_tokens) {
    fail(": expected at most ", most_tokens / setup_->groups[0].block_size,
         ", because the last token must be computed");
  }
  for (const CacheGroup& group : setup_->groups) {
    check_contain(chain, group, computed[group.id], group.first_hit_block(num_tokens));
  }
  return num_tokens;
}

// Checks that the blocks of all groups cover the same tokens. Returns their number.
int64_t RequestChecks::check_covered(const std::vector<std::vector<BlockId>>& computed) const {
  if (computed.size() != setup_->groups.size()) {
    throw_invalid("computed_blocks has ", computed.size(), " groups: expected ",
                  setup_->groups.size());
  }
  std::optional<int64_t> num_tokens;  // known after the first group that can have hits
  for (const CacheGroup& group : setup_->groups) {
    const int64_t covered = static_cast<int64_t>(computed[group.id].size()) * group.block_size;
    if (group.rules->traits.has_hits && !num_tokens) num_tokens = covered;
    const int64_t expected = group.rules->traits.has_hits ? *num_tokens : 0;
    if (covered == expected) continue;
    throw_invalid("computed_blocks[", group.id, "] covers ", covered, " tokens: expected ",
                  num_tokens.value_or(0), ", the same as the other groups");
  }
  return num_tokens.value_or(0);
}

// Checks that the cached blocks, starting with block `first`, contain the tokens of the chain. The
// blocks before them must be null.
void RequestChecks::check_contain(const TokenChain& chain, const CacheGroup& group,
                                  const std::vector<BlockId>& ids, int64_t first) const {
  for (int64_t b = 0; b < static_cast<int64_t>(ids.size()); ++b) {
    const BlockId id = ids[static_cast<size_t>(b)];
    const int64_t hash = group.hash_index(b);
    const bool is_right =
        b < first ? id == kNullBlock
                  : hash < chain.num_known_hashes() &&
                        c_.pool->holds(id, chain.known_hash(hash), group.id, chain.variant(hash));
    if (is_right) continue;
    throw_invalid("computed_blocks[", b, "] is block ", id,
                  ", which does not, or no longer, contain block ", b,
                  " of the request: look up again");
  }
}

// Inlined, because it runs for every row of a step.
inline void RequestChecks::check_step_row(const StepRequest& request, int64_t i) const {
  const int32_t row = request.rows[i];
  const int64_t num_tokens = request.num_tokens[i];
  const Row& r = check_driver(row, /*by_step=*/true);
  if (num_tokens != 0) check_not_receiving(row);
  checked_size("num_tokens", num_tokens, 0);
  const int64_t num_rejected = request.num_rejected_of(i);
  if (num_rejected != 0) check_only_drafts(row, num_rejected);
  const int64_t start = r.num_computed - num_rejected;
  check_length(start + num_tokens, "a row");
  if (has_state_ || has_bound_) check_step_pages(request, i, start);
  check_once(row);
}

// Checks what the pages of states and circular buffers require of a running row.
void RequestChecks::check_step_pages(const StepRequest& request, int64_t i, int64_t start) const {
  const int32_t row = request.rows[i];
  const Row& r = c_.row(row);
  const int64_t num_tokens = request.num_tokens[i], num_ids = request.num_ids_of(i);
  if (has_state_ && num_tokens > 0) check_decided(row, request.num_rejected_of(i), num_ids);
  if (max_drafts_ > 0) check_drafts(row, start, num_tokens, r.chain->num_tokens() + num_ids);
  check_row_places(r, start, num_tokens + request.lookahead_of(i), num_ids);
}

void RequestChecks::check_step(const StepRequest& request) const {
  checked_size("num_lookahead_tokens", request.num_lookahead, 0);
  for (int64_t i = 0; i < request.num_rows && request.lookahead != nullptr; ++i) {
    checked_size("num_lookahead_tokens", request.lookahead[i], 0);
  }
  c_.rows->begin_call();
  for (int64_t i = 0; i < request.num_rows; ++i) check_step_row(request, i);
  check_leaves_device(request);
  check_token_ids(request);
  for (const NewRow& row : request.new_rows) {
    check_has_no_engine_state();
    check_counts(row);
    check_new(*row.chain);
    // With external tokens, the slots depend on the hit, which is not known yet.
    if (row.external.num_tokens == 0) check_new_places(row, /*start=*/0);
  }
}

void RequestChecks::check_leaves_device(const StepRequest& request) const {
  if (request.num_swap_out_rows > 0) check_has_host("swap_out contains rows");
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    check_driver(row, /*by_step=*/true);
    check_on_device(row);
    check_not_receiving(row);
    if (c_.rows->name(row)) continue;
    throw_invalid("swap_out contains row ", row,
                  ", which rows or swap_out also contains: expected it once");
  }
}

void RequestChecks::check_token_ids(const StepRequest& request) const {
  const bool is_one_per_row = request.num_token_ids == nullptr;
  int64_t num_named = is_one_per_row && request.num_ids > 0 ? request.num_rows : 0;
  for (int64_t i = 0; i < request.num_rows && !is_one_per_row; ++i) {
    num_named += checked_size("num_token_ids", request.num_ids_of(i), 0);
  }
  if (num_named != request.num_ids) {
    throw_invalid("token_ids has ", request.num_ids, " entries: expected ", num_named, ", ",
                  is_one_per_row ? "one per row" : "the sum of num_token_ids");
  }
  if (request.num_ids == 0) return;
  for (int64_t i = 0; i < request.num_rows; ++i) {
    check_longer(*c_.row(request.rows[i]).chain, request.num_ids_of(i));
  }
  const int32_t* const ids = request.token_ids;
  if (std::none_of(ids, ids + request.num_ids, [](int32_t id) { return id < 0; })) return;
  for (int64_t i = 0, first = 0; i < request.num_rows; ++i) {
    const int64_t stop = first + request.num_ids_of(i);
    check_not_negative(*c_.row(request.rows[i]).chain, ids, first, stop);
    first = stop;
  }
}

void RequestChecks::check_ask(const RowAsk& ask) const {
  check_driver(ask.row, /*by_step=*/false);
  check_on_device(ask.row);
  check_not_receiving(ask.row);
  checked_size("num_lookahead_tokens", ask.num_lookahead, 0);
  const Row& r = c_.row(ask.row);
  if (ask.start) {
    check_start(ask);
  } else {
    checked_size("num_tokens", ask.num_tokens, 0);
    if (has_state_) check_decided(ask.row, /*num_rejected=*/0, ask.num_ids);
  }
  const int64_t start = ask.start.value_or(r.num_computed);
  check_length(start + ask.num_tokens, "a row");
  if (ask.start) {
    check_places(start, ask.num_tokens + ask.num_lookahead, "a row");
  } else {
    check_row_places(r, start, ask.num_tokens + ask.num_lookahead, ask.num_ids);
  }
  if (ask.ids == nullptr) return;
  check_longer(*r.chain, ask.num_ids);
  check_not_negative(*r.chain, ask.ids, 0, ask.num_ids);
}

void RequestChecks::check_start(const RowAsk& ask) const {
  const int32_t row = ask.row;
  const int64_t start = *ask.start, num_computed = c_.row(row).num_computed;
  check_once(row);
  if (start < 0) throw_invalid("start of row ", row, " is ", start, ": expected at least 0");
  if (start < num_computed) check_rejected(row, num_computed - start);
  const int64_t first_new = std::min(num_computed, c_.row(row).chain->num_tokens());
  if (ask.num_ids > 0 && start < first_new) {
    throw_invalid("start of row ", row, " is ", start, " with new token_ids: expected at least ",
                  first_new, ", because new tokens follow the known tokens");
  }
  int64_t num_slots = kMaxSize;
  for (const CacheGroup& group : setup_->groups) {
    num_slots = std::min(num_slots, group.rules->num_slots(group, c_.held(row, group)));
  }
  if (start > num_slots) {
    throw_invalid("start of row ", row, " is ", start, ": expected at most ", num_slots,
                  ", the number of its slots");
  }
  if (ask.num_tokens > 0) return;
  throw_invalid("stop of row ", row, " is ", start + ask.num_tokens,
                ": expected more than the row's start, ", start);
}

void RequestChecks::check_holdable(const BlockId* ids, int64_t n) const {
  for (int64_t i = 0; i < n; ++i) {
    c_.pool->check_id(ids[i], "ids");
    if (c_.pool->ref_count(ids[i]) > 0 || c_.pool->is_cached(ids[i])) continue;
    throw_invalid("ids holds block ", ids[i],
                  ", which is free and not cached: expected a held or cached block");
  }
}

void RequestChecks::check_holds(const BlockId* ids, int64_t n) const {
  std::unordered_map<BlockId, int64_t> asked;
  for (int64_t i = 0; i < n; ++i) {
    c_.pool->check_id(ids[i], "blocks");
    if (++asked[ids[i]] <= c_.frees->num_holds_of(ids[i])) continue;
    throw_invalid("blocks holds block ", ids[i], " more often than hold_blocks holds it: expected ",
                  c_.frees->num_holds_of(ids[i]), " times at most");
  }
}

void RequestChecks::check_fork(int32_t row, const TokenChain& child) const {
  const Row& parent = c_.rows->at(row);
  check_on_device(row);
  check_not_receiving(row);
  check_new(child);
  const int64_t num_known = parent.chain->num_tokens();
  if (num_known < parent.num_computed) {
    throw_invalid(
        "row ", row, " has ", parent.num_computed, " computed tokens, of which ", num_known,
        " are known: expected the other tokens to be appended or rejected before the fork");
  }
  if (child.begins_like(*parent.chain, parent.num_computed)) return;
  throw_invalid("the child's tokens or extra keys differ from those of row ", row,
                ": expected them to match for the ", parent.num_computed, " computed tokens");
}

}  // namespace kvcache
