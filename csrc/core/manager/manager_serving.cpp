// Serves rows: running ones, then new ones.
#include <algorithm>

#include "core/manager/manager.h"

namespace kvcache {

// Token ids that came, and the hashes of what they may fill: a digest may raise, or call back.
void Manager::take_in(const StepRequest& request) {
  intake_.append_ids(request);
  try {
    intake_.hash_ahead(request);
    for (const NewRow& row : request.new_rows) checks_.check_new(*row.chain);
  } catch (...) {
    intake_.take_back_ids(request, request.num_rows);
    throw;
  }
}

void Manager::offload_queued() {
  if (host_ == nullptr) return;
  host_->offload_queued(&plan_, /*holds_blocks=*/frees_.defers(steps().num_steps));
}

void Manager::serve_rows(const StepRequest& request) {
  for (int64_t i = 0; i < request.num_rows; ++i) {
    const int32_t row = request.rows[i];
    const int64_t rejected = request.num_rejected == nullptr ? 0 : request.num_rejected[i];
    const int64_t start = rows_[row].num_computed - rejected;
    ServedRow served;
    served.row = row;
    served.span = {start, start + request.num_tokens[i], request.lookahead_of(i)};
    const Status status = extend_row(&served);
    if (status != Status::kServed) intake_.take_back_ids_of(request, i);
    answer(served, status);
  }
}

void Manager::serve_new(const StepRequest& request) {
  for (size_t i = 0; i < request.new_rows.size(); ++i) {
    const NewRow& asked = request.new_rows[i];
    ServedRow served;
    Status status = Status::kWait;
    // A hit inside a block takes that block and the copy: without it, less may do.
    for (bool with_partial : {true, false}) {
      const PrefixHit* hit = &finder_.find(*asked.chain, with_partial, /*with_host=*/true);
      if (hit->num_host_blocks > asked.max_host_blocks) {
        hit = &finder_.find(*asked.chain, with_partial, /*with_host=*/false);
      }
      const int64_t start = hit->num_tokens;
      served.span = {start, std::min(start + asked.num_tokens, asked.chain->num_tokens()),
                     request.lookahead_of(request.num_rows + static_cast<int64_t>(i))};
      status = admit(&served, asked.chain, *hit, request.num_reserved_blocks, /*by_step=*/true);
      if (status != Status::kWait || !hit->copies_partial()) break;
    }
    if (status == Status::kServed) plan_.clear(served.row);
    answer(served, status);
  }
}

Status Manager::extend_row(ServedRow* served) {
  const int32_t row = served->row;
  Row& r = rows_[row];
  const Span& span = served->span;
  served->safe_start = span.start;
  const Demand demand =
      r.on_host ? bring_back(served) : rules_.of_running(rows_.blocks(row), span, r.may_share);
  if (demand.status != Status::kServed) return demand.status;
  r.start = span.start;
  r.num_computed = span.stop;
  growth_.serve(served, demand);
  if (r.may_share) r.may_share = rules_.shares_from(rows_.blocks(row), span.start);
  if (!r.has_forked) return Status::kServed;
  // The row has computed the blocks that it writes, though it began in another's block.
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = rows_.blocks(row)[group.id];
    const int64_t first = (group.holds_state() ? span.stop - 1 : span.start) / group.block_size;
    each.num_hits = std::min(each.num_hits, first);
  }
  return Status::kServed;
}

// Brings back from the host what the row still reads, if it fits.
Demand Manager::bring_back(ServedRow* served) {
  const RowSwap::Return back = swap_.return_of(served->row, served->span, rules_);
  if (back.demand.status != Status::kServed) return back.demand;
  swap_.move_in(served->row, served->span.start, back);
  served->safe_start = 0;
  row_context().resend(served->row);
  return back.demand;
}

// The demand of a request that takes this hit; its first blocks are in `candidate_`.
Demand Manager::demand_of_new(const TokenChain& chain, const PrefixHit& hit, const Span& span,
                              int64_t num_reserved) {
  for (const CacheGroup& group : groups_) {
    RowGrowth::set_hit(&candidate_[group.id], group, hit);
  }
  Demand demand = rules_.of_new(candidate_.data(), chain, span, num_reserved);
  if (demand.status == Status::kServed && !rows_.has_free()) demand.status = Status::kWait;
  return demand;
}

Status Manager::admit(ServedRow* served, const std::shared_ptr<TokenChain>& chain,
                      const PrefixHit& hit, int64_t num_reserved, bool by_step) {
  served->row = -1;
  const Demand demand = demand_of_new(*chain, hit, served->span, num_reserved);
  if (demand.status != Status::kServed) return demand.status;
  const int32_t row = served->row = rows_.take();
  served->safe_start = hit.num_tokens;
  Row& r = rows_[row];
  rows_.info(row) = {chain->num_tokens(), hit.num_tokens, 0};
  r.chain = chain;
  r.start = hit.num_tokens;
  r.num_computed = served->span.stop;
  r.by_step = by_step;
  std::swap_ranges(candidate_.begin(), candidate_.end(), rows_.blocks(row));
  growth_.take_hit(served, hit);
  growth_.serve(served, demand);
  served->num_before.fill(0);
  publisher_.refresh(row);
  if (chain->read_cache()) {
    stats_.add(chain->num_tokens(), hit.num_tokens, hit.num_tokens - first_host_token(hit));
  }
  return Status::kServed;
}

// From here on, the hit rests on what was on the host.
int64_t Manager::first_host_token(const PrefixHit& hit) const {
  int64_t first = hit.num_tokens;
  for (const CacheGroup& group : groups_) {
    const std::vector<PrefixHit::HostBlock>& on_host = hit.on_host[group.id];
    if (!on_host.empty()) first = std::min(first, on_host.front().column * group.block_size);
  }
  return first;
}

void Manager::answer(const ServedRow& served, Status status) {
  plan_.answer(served.row, status, served.span.start);
  if (status != Status::kServed) return;
  journal_.note_served(served.row, rows_[served.row], served.safe_start);
  if (plan_.must_resend(served.row)) return;  // sent whole when all are served
  plan_.append(served.row, rows_.blocks(served.row), served.num_before.data());
}

// Published last: what a step computes is a hit for later plans only, never within its own.
void Manager::publish_step() {
  for (const RowGrowth::StateMove& move : growth_.state_moves()) {
    publisher_.publish_state(move.row, groups_[move.group], move.num_tokens);
  }
  for (const StepJournal::Served& served : journal_.last().rows) publisher_.publish(served.row);
  growth_.release_left_states();
  publish_offloaded();
}

// Blocks that the plan reads are released behind it.
void Manager::release_held() {
  const std::vector<BlockId> held = plan_.take_held();
  frees_.release_or_defer(held.data(), static_cast<int64_t>(held.size()), steps().num_steps);
}

void Manager::resend_tables() {
  static constexpr std::array<int64_t, kMaxGroups> kFromFirst{};
  for (int32_t row : plan_.take_resent()) {
    plan_.clear(row);
    // One on the host is sent when it comes back.
    if (!rows_[row].on_host) plan_.append(row, rows_.blocks(row), kFromFirst.data());
  }
}

}  // namespace kvcache
