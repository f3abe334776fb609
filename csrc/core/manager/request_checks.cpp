// SPDX-License-Identifier: Apache-2.0
#include "core/manager/request_checks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/groups/rules/page_rules.h"
#include "core/limits.h"

namespace kvcache {

RequestChecks::RequestChecks(const Context& context)
    : c_(context),
      has_state_(has_states(context.setup->groups)),
      max_drafts_(max_drafts(context.setup->groups)),
      has_bound_(has_bound(context.setup->groups)) {}

void RequestChecks::check_group(int64_t group) const {
  if (group >= 0 && group < static_cast<int64_t>(c_.setup->groups.size())) return;
  throw std::invalid_argument("group is " + std::to_string(group) + ": expected 0 to " +
                              std::to_string(c_.setup->groups.size() - 1));
}

void RequestChecks::fail_length(int64_t num_total, const char* what) const {
  throw std::invalid_argument(std::string(what) + " would have " + std::to_string(num_total) +
                              " tokens: expected at most max_model_len, which is " +
                              std::to_string(c_.setup->options.max_model_len));
}

void RequestChecks::check_bound(int64_t start, int64_t num_slots, const char* what) const {
  const int64_t stop = std::min(start + num_slots, c_.setup->options.max_model_len);
  for (const CacheGroup& group : c_.setup->groups) {
    if (group.has_places_for(start, stop)) continue;
    const int64_t num_read = start - group.first_needed_token(start);
    throw std::invalid_argument(std::string(what) + " requests " + std::to_string(num_slots) +
                                " slots including lookahead: expected at most " +
                                std::to_string(group.num_places - num_read) + ", because group " +
                                std::to_string(group.id) + " has space for " +
                                std::to_string(group.num_places) + " tokens and reads " +
                                std::to_string(num_read) + " of them");
  }
}

void RequestChecks::fail_driver(int32_t row, bool by_step) {
  throw std::invalid_argument(
      "row " + std::to_string(row) + " was admitted by " +
      (by_step ? "admit: expected extend to serve it" : "step: expected it in the rows of step"));
}

void RequestChecks::fail_drafts(int32_t row, int64_t num_tokens, int64_t num_sure) const {
  throw std::invalid_argument("num_tokens of row " + std::to_string(row) + " is " +
                              std::to_string(num_tokens) + ": expected at most " +
                              std::to_string(num_sure + max_drafts_) + ": " +
                              std::to_string(num_sure) + " known or sampled tokens and " +
                              std::to_string(max_drafts_) + " drafts (num_speculative_blocks)");
}

void RequestChecks::fail_receiving(int32_t row) {
  throw std::invalid_argument(
      "row " + std::to_string(row) +
      " is receiving external tokens: expected a call to finish_receiving first");
}

void RequestChecks::check_has_no_state(const char* call) const {
  if (!has_state_) return;
  throw std::invalid_argument(std::string(call) +
                              " cannot return the required copies of states: expected step for a "
                              "manager with a recurrent group");
}

void RequestChecks::check_new(const TokenChain& chain, int64_t least_tokens) const {
  checked_size("the number of tokens of a new request", chain.num_tokens(), least_tokens);
  check_length(chain.num_tokens(), "a new request");
  if (chain.block_size() == c_.setup->hash_block_size) return;
  throw std::invalid_argument(
      "a request with hashes for block_size " + std::to_string(chain.block_size()) +
      " was passed to a manager with block_size " + std::to_string(c_.setup->hash_block_size));
}

void RequestChecks::check_counts(const NewRow& asked) const {
  checked_size("max_host_blocks", asked.max_host_blocks, 0);
  checked_size("num_lookahead_tokens", asked.num_lookahead, 0);
  checked_size("num_reserved_blocks", asked.num_reserved_blocks, 0);
  checked_size("num_prompt_tokens", asked.num_prompt, 0);
  checked_size("num_shared_tokens", asked.num_shared, 0);
  checked_size("external.num_tokens", asked.external.num_tokens, 0);
  if (asked.external.num_tokens > 0) {
    check_all_transferred(asked.external.num_tokens);
    if (!asked.reads()) {
      throw std::invalid_argument("external.num_tokens is " +
                                  std::to_string(asked.external.num_tokens) +
                                  ", but the request has read_cache=False: expected 0");
    }
  }
  if (!asked.external.is_delayed) {
    checked_size("num_tokens", asked.num_tokens, 1);
    return;
  }
  if (asked.external.num_tokens == 0) {
    throw std::invalid_argument(
        "external.delayed is True, and external.num_tokens is 0: expected 1 or more tokens");
  }
  if (asked.num_tokens == 0) return;
  throw std::invalid_argument("num_tokens is " + std::to_string(asked.num_tokens) +
                              ": expected 0 with external.delayed, because the request computes "
                              "nothing until its external tokens have arrived");
}

void RequestChecks::check_all_transferred(int64_t num_external) const {
  for (const CacheGroup& group : c_.setup->groups) {
    if (group.is_transferred || !group.is_cached) continue;
    throw std::invalid_argument("external.num_tokens is " + std::to_string(num_external) +
                                ": expected 0, because group " + std::to_string(group.id) +
                                " is cached but not transferred, so it would lack their KV");
  }
}

void RequestChecks::check_external(const NewRow& asked, int64_t num_hit) const {
  const int64_t num_known = asked.chain->num_tokens();
  if (num_hit + asked.external.num_tokens < num_known || asked.external.num_tokens == 0) return;
  throw std::invalid_argument(
      "external.num_tokens is " + std::to_string(asked.external.num_tokens) +
      ": expected at most " + std::to_string(num_known - 1 - num_hit) +
      ", because the request has " + std::to_string(num_known) + " tokens, of which " +
      std::to_string(num_hit) + " are cached, and the last token must be computed");
}

void RequestChecks::check_receive(int32_t row, int64_t num_tokens) const {
  const Row& r = c_.rows->at(row);
  const int64_t most = r.num_computed - c_.rows->info(row).num_hit;
  if (!r.is_receiving()) {
    throw std::invalid_argument(
        "row " + std::to_string(row) +
        " is not receiving: expected a request that was admitted with external.delayed");
  }
  if (num_tokens >= 0 && num_tokens <= most) return;
  throw std::invalid_argument("num_tokens is " + std::to_string(num_tokens) + ": expected 0 to " +
                              std::to_string(most) + ", the external tokens of the request");
}

void RequestChecks::check_departure(int32_t row, const std::string* keep_as) const {
  if ((*c_.rows)[row].is_receiving() && keep_as == nullptr) {
    throw std::invalid_argument(
        "row " + std::to_string(row) +
        " is receiving external tokens: expected a call to finish_receiving "
        "first, or keep_blocks");
  }
  if (keep_as == nullptr) return;
  check_on_device(row);
  if (!c_.frees->keeps(*keep_as)) return;
  throw std::invalid_argument("blocks of request '" + *keep_as +
                              "' are already kept: expected a call to release_blocks first");
}

void RequestChecks::check_kept(const std::string& name) const {
  if (c_.frees->keeps(name)) return;
  throw std::invalid_argument("no blocks of request '" + name +
                              "' are kept: expected a request that was freed with keep_blocks");
}

void RequestChecks::check_rejected(int32_t row, int64_t num_rejected) const {
  if (num_rejected == 0) return;
  const Row& r = (*c_.rows)[row];
  const std::string what =
      "num_rejected_tokens of row " + std::to_string(row) + " is " + std::to_string(num_rejected);
  checked_size("num_rejected_tokens", num_rejected, 0);
  if (has_state_ && max_drafts_ == 0) {
    throw std::invalid_argument(
        what +
        ": expected 0, because a recurrent state cannot undo tokens without "
        "num_speculative_blocks");
  }
  if (has_state_ && num_rejected > r.num_drafts) {
    throw std::invalid_argument(what + ": expected at most " + std::to_string(r.num_drafts) +
                                ", the drafts of its last step whose states are kept");
  }
  int64_t kept = r.start;
  for (const CacheGroup& group : c_.setup->groups) {
    const RowBlocks& each = c_.rows->blocks(row)[group.id];
    if (!group.is_cached) continue;
    kept = std::max(kept, each.num_published * group.block_size);
    if (group.has_partial) kept = std::max(kept, each.num_partial * c_.setup->hash_block_size);
  }
  if (r.num_computed - num_rejected >= kept) return;
  throw std::invalid_argument(what + ": expected at most " +
                              std::to_string(std::max<int64_t>(r.num_computed - kept, 0)) +
                              ", the number of uncached tokens of its last step");
}

void RequestChecks::check_only_drafts(int32_t row, int64_t num_rejected) const {
  if (num_rejected == 0) return;
  check_rejected(row, num_rejected);
  const Row& r = (*c_.rows)[row];
  const int64_t num_unknown = std::max<int64_t>(r.num_computed - r.num_known, 0);
  if (num_rejected <= num_unknown) return;
  throw std::invalid_argument("num_rejected_tokens of row " + std::to_string(row) + " is " +
                              std::to_string(num_rejected) + ": expected at most " +
                              std::to_string(num_unknown) +
                              ", its drafts: tokens that were not known when it was last "
                              "served");
}

void RequestChecks::fail_undecided(int32_t row, int64_t num_left) {
  throw std::invalid_argument(
      "row " + std::to_string(row) + " has " + std::to_string(num_left) +
      " drafts of its last step that are neither rejected nor known: expected num_rejected_tokens "
      "and the token_ids of accepted drafts before the next step, because a recurrent state "
      "continues after the last accepted token");
}

int64_t RequestChecks::check_computed(const TokenChain& chain,
                                      const std::vector<std::vector<BlockId>>& computed,
                                      bool reads) const {
  if (computed.size() != c_.setup->groups.size()) {
    throw std::invalid_argument("computed_blocks has " + std::to_string(computed.size()) +
                                " groups: expected " + std::to_string(c_.setup->groups.size()));
  }
  int64_t num_tokens = -1;
  size_t most_blocks = 0;
  for (const CacheGroup& group : c_.setup->groups) {
    const auto n = static_cast<int64_t>(computed[group.id].size());
    most_blocks = std::max(most_blocks, computed[group.id].size());
    const int64_t covered = n * group.block_size;
    const bool has_hits = group.rules->traits.has_hits;
    if (has_hits ? num_tokens < 0 || covered == num_tokens : n == 0) {
      if (has_hits) num_tokens = covered;
      continue;
    }
    throw std::invalid_argument("computed_blocks[" + std::to_string(group.id) + "] covers " +
                                std::to_string(covered) + " tokens: expected " +
                                std::to_string(std::max<int64_t>(num_tokens, 0)) +
                                ", the same as the other groups");
  }
  if (num_tokens <= 0) return 0;
  const std::string what = "computed_blocks has " + std::to_string(most_blocks) + " blocks";
  if (!c_.setup->options.enable_caching) {
    throw std::invalid_argument(what + ", but caching is off (enable_caching=False)");
  }
  if (!reads) {
    throw std::invalid_argument(what + ", but the request has read_cache=False: expected none");
  }
  if (num_tokens > chain.num_tokens() - 1) {
    const int64_t most = (chain.num_tokens() - 1) / c_.setup->groups[0].block_size;
    throw std::invalid_argument(what + ": expected at most " + std::to_string(most) +
                                ", because the last token must be computed");
  }
  const HashList& hashes = chain.known_hashes();
  for (const CacheGroup& group : c_.setup->groups) {
    const std::vector<BlockId>& ids = computed[group.id];
    const int64_t first = group.first_hit_block(num_tokens);
    for (int64_t b = 0; b < static_cast<int64_t>(ids.size()); ++b) {
      const int64_t last_hash = (b + 1) * group.num_hashes - 1;
      const BlockId id = ids[static_cast<size_t>(b)];
      if (b < first ? id == kNullBlock
                    : last_hash < static_cast<int64_t>(hashes.size()) &&
                          c_.pool->holds(id, hashes[static_cast<size_t>(last_hash)], group.id,
                                         chain.variant(last_hash))) {
        continue;
      }
      throw std::invalid_argument("computed_blocks[" + std::to_string(b) + "] is block " +
                                  std::to_string(id) +
                                  ", which does not, or no longer, contain block " +
                                  std::to_string(b) + " of the request: look up again");
    }
  }
  return num_tokens;
}

void RequestChecks::check_step_rows(const StepRequest& request) const {
  c_.rows->begin_call();
  for (int64_t i = 0; i < request.num_rows; ++i) {
    const int32_t row = request.rows[i];
    check_driver(row, /*by_step=*/true);
    if (request.num_tokens[i] != 0) check_not_receiving(row);
    Row& r = (*c_.rows)[row];
    if (request.num_tokens[i] < 0) checked_size("num_tokens", request.num_tokens[i], 0);
    const int64_t num_rejected = request.num_rejected == nullptr ? 0 : request.num_rejected[i];
    if (num_rejected != 0) check_only_drafts(row, num_rejected);
    check_length(r.num_computed - num_rejected + request.num_tokens[i], "a row");
    if (has_state_ && request.num_tokens[i] > 0) {
      check_decided(row, num_rejected, request.num_ids_of(i));
    }
    if (max_drafts_ > 0) {
      check_drafts(row, r.num_computed - num_rejected, request.num_tokens[i],
                   r.chain->num_tokens() + request.num_ids_of(i));
    }
    check_row_places(r, r.num_computed - num_rejected,
                     request.num_tokens[i] + request.lookahead_of(i), request.num_ids_of(i));
    if (!c_.rows->name(row)) {
      throw std::invalid_argument("rows contains row " + std::to_string(row) + " twice");
    }
  }
  if (request.num_swap_out_rows > 0) check_has_host("swap_out contains rows");
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    check_driver(row, /*by_step=*/true);
    check_on_device(row);
    check_not_receiving(row);
    if (!c_.rows->name(row)) {
      throw std::invalid_argument("swap_out contains row " + std::to_string(row) +
                                  ", which rows or swap_out also contains: expected it once");
    }
  }
}

void RequestChecks::check_token_ids(const StepRequest& request) const {
  int64_t num_named = 0;
  for (int64_t i = 0; i < request.num_rows; ++i) {
    if (request.num_token_ids == nullptr) {
      num_named += request.num_ids > 0;
      continue;
    }
    checked_size("num_token_ids", request.num_token_ids[i], 0);
    num_named += request.num_token_ids[i];
  }
  if (num_named != request.num_ids) {
    throw std::invalid_argument(
        "token_ids has " + std::to_string(request.num_ids) + " entries: expected " +
        std::to_string(num_named) + ", " +
        (request.num_token_ids == nullptr ? "one per row" : "the sum of num_token_ids"));
  }
  for (int64_t i = 0; i < request.num_rows && request.num_ids > 0; ++i) {
    // The last token may be sampled without ever being computed, so it is not counted.
    const int64_t n = request.num_token_ids == nullptr ? 1 : request.num_token_ids[i];
    if (n > 0) check_length((*c_.rows)[request.rows[i]].chain->num_tokens() + n - 1, "a request");
  }
  const int32_t* ids = request.token_ids;
  if (std::none_of(ids, ids + request.num_ids, [](int32_t id) { return id < 0; })) return;
  for (int64_t i = 0, first = 0; i < request.num_rows; ++i) {
    const int64_t stop = first + (request.num_token_ids == nullptr ? 1 : request.num_token_ids[i]);
    const bool takes_them = (*c_.rows)[request.rows[i]].chain->takes_placeholders();
    for (; first < stop; ++first) {
      if (ids[first] < 0 && !takes_them) TokenIds::fail_negative(first, ids[first]);
    }
  }
}

void RequestChecks::check_step(const StepRequest& request) const {
  checked_size("num_lookahead_tokens", request.num_lookahead, 0);
  if (request.lookahead != nullptr) {
    for (int64_t i = 0; i < request.num_rows; ++i) {
      checked_size("num_lookahead_tokens", request.lookahead[i], 0);
    }
  }
  check_step_rows(request);
  check_token_ids(request);
  for (size_t i = 0; i < request.new_rows.size(); ++i) {
    const NewRow& row = request.new_rows[i];
    check_counts(row);
    check_new(*row.chain);
    // With external tokens, the slots depend on the hit, which is not known yet.
    if (row.external.num_tokens == 0) check_new_places(row, /*start=*/0);
  }
}

void RequestChecks::check_ask(const RowAsk& ask) const {
  check_driver(ask.row, /*by_step=*/false);
  check_on_device(ask.row);
  check_not_receiving(ask.row);
  checked_size("num_lookahead_tokens", ask.num_lookahead, 0);
  const Row& r = (*c_.rows)[ask.row];
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
  // The last token may be sampled without ever being computed, so it is not counted.
  if (ask.num_ids > 0) check_length(r.chain->num_tokens() + ask.num_ids - 1, "a request");
  for (int64_t i = 0; i < ask.num_ids && !r.chain->takes_placeholders(); ++i) {
    if (ask.ids[i] < 0) TokenIds::fail_negative(i, ask.ids[i]);
  }
}

void RequestChecks::check_start(const RowAsk& ask) const {
  const int32_t row = ask.row;
  const int64_t start = *ask.start, num_computed = (*c_.rows)[row].num_computed;
  const auto what = [row](const char* name, int64_t value) {
    return std::string(name) + " of row " + std::to_string(row) + " is " + std::to_string(value);
  };
  if (!c_.rows->name(row)) {
    throw std::invalid_argument("rows contains row " + std::to_string(row) + " twice");
  }
  if (start < 0) throw std::invalid_argument(what("start", start) + ": expected at least 0");
  if (start < num_computed) check_rejected(row, num_computed - start);
  const int64_t num_known = (*c_.rows)[row].chain->num_tokens();
  if (ask.num_ids > 0 && start < std::min(num_computed, num_known)) {
    throw std::invalid_argument(what("start", start) + " with new token_ids: expected at least " +
                                std::to_string(std::min(num_computed, num_known)) +
                                ", because new tokens follow the known tokens");
  }
  int64_t num_slots = kMaxSize;
  for (const CacheGroup& group : c_.setup->groups) {
    num_slots = std::min(num_slots, group.rules->num_slots(group, c_.rows->blocks(row)[group.id]));
  }
  if (start > num_slots) {
    throw std::invalid_argument(what("start", start) + ": expected at most " +
                                std::to_string(num_slots) + ", the number of its slots");
  }
  if (ask.num_tokens > 0) return;
  throw std::invalid_argument(what("stop", start + ask.num_tokens) +
                              ": expected more than the row's start, " + std::to_string(start));
}

void RequestChecks::check_fork(int32_t row, const TokenChain& child) const {
  const Row& parent = c_.rows->at(row);
  check_on_device(row);
  check_not_receiving(row);
  check_new(child);
  const int64_t num_known = parent.chain->num_tokens();
  if (num_known < parent.num_computed) {
    throw std::invalid_argument(
        "row " + std::to_string(row) + " has " + std::to_string(parent.num_computed) +
        " computed tokens, of which " + std::to_string(num_known) +
        " are known: expected the other tokens to be appended or rejected before the fork");
  }
  if (child.begins_like(*parent.chain, parent.num_computed)) return;
  throw std::invalid_argument("the child's tokens or extra keys differ from those of row " +
                              std::to_string(row) + ": expected them to match for the " +
                              std::to_string(parent.num_computed) + " computed tokens");
}

void RequestChecks::check_has_host(const char* what) const {
  if (c_.host != nullptr) return;
  throw std::invalid_argument(std::string(what) +
                              ", but there is no host tier: expected num_host_blocks of 2 or more");
}

void RequestChecks::fail_on_host(int32_t row) {
  throw std::invalid_argument("row " + std::to_string(row) +
                              " is swapped out: expected one on the device");
}

void RequestChecks::check_swap(const std::vector<int32_t>& rows, bool on_host) const {
  c_.rows->begin_call();
  for (int32_t row : rows) {
    check_driver(row, /*by_step=*/false);
    if ((*c_.rows)[row].is_on_host() != on_host) {
      throw std::invalid_argument("row " + std::to_string(row) +
                                  (on_host ? " is on the device: expected one that is swapped out"
                                           : " is swapped out: expected one on the device"));
    }
    check_not_receiving(row);
    if (!c_.rows->name(row)) {
      throw std::invalid_argument("rows contains row " + std::to_string(row) + " twice");
    }
  }
}

void RequestChecks::check_leaving(const int32_t* rows, int64_t n, const KeptNames& kept) const {
  c_.rows->begin_call();
  for (int64_t i = 0; i < n; ++i) {
    c_.rows->at(rows[i]);
    check_departure(rows[i], kept.empty() ? nullptr : &kept[static_cast<size_t>(i)]);
    if (c_.rows->name(rows[i])) continue;
    throw std::invalid_argument("row " + std::to_string(rows[i]) +
                                " would be freed twice: expected each row once");
  }
}

void RequestChecks::check_ids(const std::vector<BlockId>& ids, const char* name) const {
  for (BlockId id : ids) c_.pool->check_id(id, name);
}

void RequestChecks::check_report(int64_t step_id, bool completed,
                                 const std::vector<BlockId>& failed,
                                 const std::vector<BlockId>& failed_on_host) const {
  c_.journal->check_step_id(step_id);
  check_ids(failed, "failed_pages");
  if (!failed_on_host.empty()) check_has_host("failed_host_pages contains pages");
  for (BlockId page : failed_on_host) c_.host->check_id(page, "failed_host_pages");
  if (!completed) c_.journal->check_may_abort(step_id);
}

}  // namespace kvcache
