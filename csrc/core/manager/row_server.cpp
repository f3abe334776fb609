// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_server.h"

#include <algorithm>
#include <array>

#include "core/groups/rules/page_rules.h"

namespace kvcache {

RowServer::RowServer(const RowContext& context, const Parts& parts, const ManagerOptions& options)
    : c_(context),
      parts_(parts),
      holders_(c_),
      rules_(c_, options),
      growth_(c_),
      has_bound_(has_bound(*c_.groups)),
      max_drafts_(max_drafts(*c_.groups)),
      candidate_(c_.groups->size()) {}

// Returns the span of a running row. Tokens after the known tokens are drafts, except for the first
// one. Inlined, because it runs for every row of a step.
inline Span RowServer::span_of(const Row& r, int64_t num_rejected, int64_t num_tokens,
                               int64_t num_lookahead) const {
  const int64_t start = r.num_computed - num_rejected;
  Span span{start, start + num_tokens, num_lookahead};
  if (max_drafts_ == 0) {  // otherwise, all earlier drafts are decided
    span.num_undecided = r.num_undecided(start);
    return span;
  }
  const int64_t num_known = std::max(start + 1, r.chain->num_tokens());
  span.num_drafts = std::max<int64_t>(span.stop - num_known, 0);
  span.num_accepted = r.num_drafts_after(num_rejected);
  return span;
}

inline void RowServer::advance(int32_t row, Row* r, const Span& span) {
  r->start = static_cast<int32_t>(span.start);
  r->num_computed = span.stop;
  r->num_known = static_cast<int32_t>(r->chain->num_tokens());
  r->num_undecided_before = static_cast<int32_t>(span.num_undecided);
  if (!has_bound_) return;
  int64_t& num_slots = c_.rows->info(row).num_slots;
  num_slots = std::max(num_slots, span.stop + span.lookahead);
}

// In most steps, a row only advances: neither its blocks nor anything that depends on them changes.
inline bool RowServer::pass_quietly(int32_t row, Row* r, const Span& span) {
  if (span.stop + span.lookahead > c_.rows->quiet_until(row)) return false;
  advance(row, r, span);
  return true;
}

void RowServer::serve_rows(const StepRequest& request) {
  c_.pool->set_taker(Taker::kRunning);
  int32_t* num_computed_out =
      c_.plan->answer_running(request.rows, request.num_tokens, request.num_rows);
  // Most notes are added here directly, so that the journal does not find its step for each row.
  std::vector<StepJournal::Served>& notes = c_.journal->served();
  notes.reserve(static_cast<size_t>(request.num_rows));
  for (int64_t i = 0; i < request.num_rows; ++i) {
    const int32_t row = request.rows[i];
    const int64_t num_rejected = request.num_rejected_of(i), num_tokens = request.num_tokens[i];
    Row& r = c_.row(row);
    const Span span = span_of(r, num_rejected, num_tokens, request.lookahead_of(i));
    num_computed_out[i] = static_cast<int32_t>(span.start);
    if (num_tokens == 0) {  // the row only loses its rejected drafts
      r.take_back(num_rejected);
    } else if (pass_quietly(row, &r, span)) {
      notes.push_back({row, r.admission, span.start});
    } else {
      extend_row(row, span, request, i);  // adds the note if the row is served
    }
  }
}

void RowServer::publish_served() {
  publish_left_states();
  for (const StepJournal::Served& served : c_.journal->last().rows) {
    parts_.publisher->publish(served.row);
  }
  growth_.release_left_states();
}

void RowServer::serve_new(const StepRequest& request, const std::vector<int64_t>& external_hits) {
  for (size_t i = 0; i < request.new_rows.size(); ++i) {
    const NewRow& asked = request.new_rows[i];
    ServedRow served;
    const Status status =
        admit_new(&served, asked, asked.external.num_tokens > 0 ? external_hits[i] : 0);
    const bool is_served = status == Status::kServed;
    const Span& span = served.span;
    c_.plan->answer(served.row, status, span.start, is_served ? span.stop - span.start : 0);
    if (!is_served) continue;
    c_.plan->clear(served.row);
    note_served(served);
  }
}

// Tries the longest hit first. Returns kNever only if the request never fits even without a hit.
Status RowServer::admit_new(ServedRow* served, const NewRow& asked, int64_t external_hit) {
  Status answer = Status::kNever;
  for (HitChoice choice : kHitChoices) {
    const PrefixHit& hit = find_hit(asked, choice);
    served->span = span_of(asked, hit);
    served->row = -1;
    // Earlier rows of this step have changed the cache, so the external load would be for different
    // tokens.
    if (asked.external.num_tokens > 0 && hit.num_tokens != external_hit) return Status::kWait;
    const Status status = admit(served, asked, hit, /*by_step=*/true);
    answer = std::min(answer, status);
    if (!tries_less(asked, hit, status)) break;
  }
  return answer;
}

// The hit is on the device alone if its part on the host is too long for the request.
const PrefixHit& RowServer::find_hit(const NewRow& asked, HitChoice choice) {
  // External tokens were counted from the end of a whole block, so the hit before them must consist
  // of whole blocks.
  const bool with_partial = choice == HitChoice::kPartial && asked.external.num_tokens == 0;
  const bool reads = choice != HitChoice::kNone && asked.reads();
  const auto find = [&](bool with_host) {
    return &parts_.finder->find(*asked.chain, with_partial, with_host, reads);
  };
  const PrefixHit* hit = find(/*with_host=*/true);
  MissReasons::Found found{hit->num_tokens, hit->num_tokens, hit->num_shared_tokens};
  if (hit->num_host_blocks > asked.max_host_blocks) {
    hit = find(/*with_host=*/false);
    found.num_tokens = hit->num_tokens;
  }
  if (choice == HitChoice::kPartial) found_ = found;  // other choices give shorter hits
  return *hit;
}

Status RowServer::would_fit(const NewRow& asked, bool whole) {
  Status answer = Status::kNever;
  for (HitChoice choice : kHitChoices) {
    const PrefixHit& hit = find_hit(asked, choice);
    const Span span = span_of(asked, hit);
    const Demand demand = demand_of_new(asked, hit, span);
    const Status status =
        whole ? rules_.of_whole(candidate_.data(), *asked.chain, span, asked.num_tokens, demand)
              : demand.status;
    // Accepts the first hit that fits. Later chunks are not considered, as in `step`.
    if (demand.status == Status::kServed) return status;
    answer = std::min(answer, status);
    if (!tries_less(asked, hit, demand.status)) break;
  }
  return answer;
}

Status RowServer::would_extend(int32_t row, int64_t num_tokens,
                               int64_t num_lookahead_tokens) const {
  const Row& r = c_.row(row);
  const Span span = span_of(r, /*num_rejected=*/0, num_tokens, num_lookahead_tokens);
  return r.is_on_host()
             ? parts_.swap->return_of(row, span, rules_).demand.status
             : rules_.of_running(c_.rows->blocks(row), span, r.may_share(), r.by_step()).status;
}

Status RowServer::extend(ServedRow* served) {
  const int32_t row = served->row;
  Row& r = c_.row(row);
  const Span& span = served->span;
  const Demand demand = r.is_on_host()
                            ? bring_back(served)
                            : rules_.of_running(c_.rows->blocks(row), span, r.may_share(),
                                                /*gives_up=*/r.by_step());
  if (demand.status != Status::kServed) return demand.status;
  advance(row, &r, span);
  r.num_drafts = static_cast<int32_t>(span.num_drafts);
  growth_.serve(served, demand);
  if (r.may_share() && !rules_.shares_from(c_.rows->blocks(row), span.start)) {
    r.sharing = Sharing::kEarlier;
  }
  if (r.has_forked()) keep_own_blocks(*served);
  c_.rows->set_quiet_until(row, c_.rows->next_quiet_until(row));
  return Status::kServed;
}

// Loads the host pages that the row still reads, if they fit.
Demand RowServer::bring_back(ServedRow* served) {
  const RowSwap::Return back = parts_.swap->return_of(served->row, served->span, rules_);
  if (back.demand.status != Status::kServed) return back.demand;
  parts_.swap->move_in(served->row, served->span.start, back);
  served->safe_start = 0;
  c_.resend(served->row);
  return back.demand;
}

// Computes the demand of a request that takes this hit. Stores the request's initial blocks in
// `candidate_`.
Demand RowServer::demand_of_new(const NewRow& asked, const PrefixHit& hit, const Span& span) {
  for (const CacheGroup& group : *c_.groups) {
    RowGrowth::set_hit(&candidate_[group.id], group, hit, span.start);
  }
  Demand demand = rules_.of_new(candidate_.data(), asked, span);
  if (demand.status == Status::kServed && !c_.rows->has_free()) demand.status = Status::kWait;
  return demand;
}

Status RowServer::admit(ServedRow* served, const NewRow& asked, const PrefixHit& hit,
                        bool by_step) {
  served->row = -1;
  const Demand demand = demand_of_new(asked, hit, served->span);
  if (demand.status != Status::kServed) return demand.status;
  const int32_t row = served->row = c_.rows->take();
  // Received tokens do not depend on this step.
  served->safe_start = asked.external.is_delayed ? served->span.start : hit.num_tokens;
  begin_row(row, asked, hit, by_step);
  advance(row, &c_.row(row), served->span);
  if (parts_.misses != nullptr) note_misses(row, asked, hit);
  if (parts_.compared != nullptr && asked.reads()) compare_hit(*asked.chain, hit.num_tokens);
  std::swap_ranges(candidate_.begin(), candidate_.end(), c_.rows->blocks(row));
  growth_.take_hit(served, hit);
  growth_.serve(served, demand);
  c_.rows->set_quiet_until(row, c_.rows->next_quiet_until(row));
  served->num_before.fill(0);
  parts_.publisher->refresh(row);
  if (asked.reads()) count_hit(row, hit);
  return Status::kServed;
}

void RowServer::begin_row(int32_t row, const NewRow& asked, const PrefixHit& hit, bool by_step) {
  Row& r = c_.row(row);
  r.chain = asked.chain;
  r.state = asked.external.is_delayed ? RowState::kReceiving : RowState::kRunning;
  if (by_step) {
    r.served_by = ServedBy::kSteps;
  } else {
    r.served_by = asked.waits_for_marks ? ServedBy::kMarkedCalls : ServedBy::kCalls;
  }
  AdmissionInfo& info = c_.rows->info(row);
  info = {};
  info.num_prompt = asked.num_prompt > 0 ? asked.num_prompt : asked.chain->num_tokens();
  info.num_hit = info.hit_end = hit.num_tokens;
  info.num_shared = hit.num_shared_tokens;
  info.reads = asked.reads();
  if (by_step) info.step = c_.journal->last().id;
  info.retained =
      parts_.ends->retained(*asked.chain, info.num_prompt, hit.num_tokens, hit.num_shared_tokens);
}

// Reports the hits that a request has in the caches which the eviction policy simulates.
void RowServer::compare_hit(const TokenChain& chain, int64_t num_tokens) {
  Duel& duel = parts_.compared->duel();
  const int64_t by_lru = parts_.finder->find_in(duel.lru(), chain);
  const int64_t by_value = parts_.finder->find_in(duel.own(), chain);
  duel.count(num_tokens / parts_.finder->compared_unit(), by_lru, by_value);
}

void RowServer::restart(int32_t row, int64_t num_had) {
  Row& r = c_.row(row);
  parts_.stats->note_had(r.chain.get(), num_had);
  c_.rows->disturb(row);
  if (r.chain->num_encoder_tokens() == 0) r.state = RowState::kRunning;
  r.sharing = Sharing::kNone;
  AdmissionInfo& info = c_.rows->info(row);
  const PrefixHit& hit =
      parts_.finder->find(*r.chain, /*with_partial=*/false, /*with_host=*/false, info.reads);
  info.num_slots = 0;
  info.num_hit = info.hit_end = hit.num_tokens;
  for (const CacheGroup& group : *c_.groups) {
    if (group.rules->traits.follows_sequence) {
      RowGrowth::set_hit(&c_.held(row, group), group, hit, hit.num_tokens);
    }
  }
  ServedRow served{row, {}};
  growth_.take_hit(&served, hit);
  r.num_computed = hit.num_tokens;
  r.start = static_cast<int32_t>(hit.num_tokens);
  r.num_drafts = r.num_undecided_before = 0;
  r.is_stale = false;
  parts_.publisher->refresh(row);
  if (info.reads) count_hit(row, hit);
}

Slots RowServer::allocate(const NewRow& asked, const PrefixHit& hit) {
  c_.plan->begin_direct();
  ServedRow served;
  served.span = span_of(asked, hit);
  if (parts_.misses != nullptr) {
    NewRow on_device = asked;  // `admit` loads no blocks
    on_device.max_host_blocks = 0;
    find_hit(on_device, HitChoice::kPartial);  // sets `found_`
  }
  const Status status = admit(&served, asked, hit, /*by_step=*/false);
  Slots slots{status, served.row, {}, {}};
  if (status != Status::kServed) return slots;
  if (hit.copies_partial()) await_copies();
  std::array<int64_t, kMaxGroups> num_computed{};
  for (const CacheGroup& group : *c_.groups) {
    num_computed[group.id] = static_cast<int64_t>(hit.blocks[group.id].size());
  }
  add_new_blocks(served.row, num_computed.data(), &slots);
  c_.rows->info(served.row).num_marked = hit.num_tokens;
  publish_direct(served.row);
  return slots;
}

Slots RowServer::serve(const RowAsk& ask, bool lists_new) {
  const int32_t row = ask.row;
  Row& r = c_.row(row);
  c_.pool->set_taker(Taker::kRunning);
  ServedRow served{row, ask.start
                            ? Span{*ask.start, *ask.start + ask.num_tokens, ask.num_lookahead}
                            : span_of(r, /*num_rejected=*/0, ask.num_tokens, ask.num_lookahead)};
  Slots slots{Status::kServed, row, {}, {}};
  if (pass_quietly(row, &r, served.span)) {
    if (lists_new) slots.new_blocks.resize(c_.groups->size());
    parts_.publisher->publish(row);
    return slots;
  }
  c_.plan->begin_direct();
  slots.status = extend(&served);
  if (slots.status != Status::kServed) {
    parts_.intake->take_back(ask);
    return slots;
  }
  slots.copies = c_.plan->direct_pairs();
  if (lists_new) add_new_blocks(row, served.num_before.data(), &slots);
  publish_direct(row);
  return slots;
}

Slots RowServer::fork(int32_t row, const std::shared_ptr<TokenChain>& chain) {
  if (!c_.rows->has_free()) return {Status::kWait, -1, {}, {}};
  // Publishes filled blocks before the fork, so that neither the row nor its child must publish
  // shared blocks later.
  parts_.publisher->publish(row);
  accept_drafts(row);
  const int64_t num_computed = c_.row(row).num_computed;
  parts_.stats->note_fork(chain.get(), num_computed);
  chain->adopt_hashes(*c_.row(row).chain, num_computed);

  const int32_t child = c_.rows->take();
  c_.row(row).sharing = Sharing::kNext;
  c_.rows->disturb(row);
  copy_row(row, child, chain);
  share_blocks(row, child);
  parts_.publisher->refresh(child);
  if (parts_.misses != nullptr) {
    parts_.misses->note_fork(child, chain->num_tokens(), num_computed);
  }
  const Row& parent = c_.row(row);
  if (parent.by_step()) c_.journal->inherit(row, parent, child, c_.row(child));
  c_.resend(child);
  return {Status::kServed, child, {}, {}};
}

void RowServer::copy_row(int32_t row, int32_t child, const std::shared_ptr<TokenChain>& chain) {
  Row& r = c_.row(child);
  const int64_t admission = r.admission;
  r = c_.row(row);
  r.chain = chain;
  r.start = static_cast<int32_t>(r.num_computed);
  r.num_undecided_before = 0;
  r.admission = admission;
  const AdmissionInfo& parent = c_.rows->info(row);
  AdmissionInfo& info = c_.rows->info(child);
  info = {};
  info.num_prompt = chain->num_tokens();
  info.num_hit = r.num_computed;
  info.num_marked = parent.num_marked;
  info.num_slots = parent.num_slots;
  info.hit_end = parent.hit_end;
  info.step = parent.step;
  info.reads = chain->read_cache();
  info.retained = parts_.ends->retained(*chain, info.num_prompt, r.num_computed, /*num_shared=*/0);
}

// The child publishes none of the blocks that the parent has computed.
void RowServer::share_blocks(int32_t row, int32_t child) {
  const int64_t num_computed = c_.row(row).num_computed;
  for (const CacheGroup& group : *c_.groups) {
    RowBlocks& held = c_.held(child, group);
    held = c_.held(row, group);
    group.rules->fork(&held);
    c_.pool->retain(held.blocks.data() + held.num_dropped, held.num_alive());
    if (!group.rules->traits.follows_sequence) continue;
    held.num_hits = static_cast<int32_t>(held.size());
    held.num_published = std::max(held.num_published, num_computed / group.block_size);
    held.num_partial = static_cast<int32_t>(
        std::max<int64_t>(held.num_partial, num_computed / c_.hash_block_size));
  }
}

int64_t RowServer::num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group) const {
  int64_t n = 0;
  for (BlockId id : c_.rows->blocks(row)[group].blocks) {
    if (id == kNullBlock || holders_.num_rows(id) != num_running) break;
    ++n;
  }
  return n;
}

}  // namespace kvcache
