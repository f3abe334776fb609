// Reports on steps, which are done or came to nothing, and blocks that turned out to be invalid.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

// Checks everything first: what a report says is taken in whole or not at all.
Recompute Manager::report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                          const std::vector<BlockId>& failed_on_host) {
  const Call call(this);
  journal_.check_step_id(step_id);
  checks_.check_ids(pool_, failed, "failed_pages");
  if (!failed_on_host.empty()) {
    checks_.check_has_host("failed_host_pages names pages");
    checks_.check_ids(host_->pages(), failed_on_host, "failed_host_pages");
  }
  const bool any_failed = !failed.empty() || !failed_on_host.empty();
  if (!completed) journal_.check_may_abort(step_id);
  if (!completed || any_failed) intake_.hash_rows();  // else nothing becomes invalid: most reports
  Recompute all;
  if (!completed) all = abort_from(step_id);
  if (any_failed) {
    // Before the step is done: its journal knows who has used these pages and let go of them.
    const Recompute more = invalidate_blocks(failed, failed_on_host);
    all.rows.insert(all.rows.end(), more.rows.begin(), more.rows.end());
    all.num_computed_tokens.insert(all.num_computed_tokens.end(), more.num_computed_tokens.begin(),
                                   more.num_computed_tokens.end());
  }
  if (completed) complete_to(step_id);
  return all;
}

Recompute Manager::invalidate(const BlockId* ids, int64_t n) {
  const Call call(this);
  const std::vector<BlockId> invalid(ids,
                                     ids + n);  // a digest from Python could change the caller's
  checks_.check_ids(pool_, invalid, "ids");
  intake_.hash_rows();
  return invalidate_blocks(invalid, {});
}

void Manager::complete_to(int64_t step_id) {
  journal_.complete_to(step_id);
  publish_arrived();
  frees_.release_completed();
}

// Blocks of hits on the host are found on the device once they have arrived, unless something was
// heard since against what their pages hold.
void Manager::publish_arrived() {
  if (host_ == nullptr) return;
  const std::vector<HostTier::Onboard> arrived = host_->take_arrived(steps().num_completed);
  for (const HostTier::Onboard& each : arrived) {
    if (host_->may_publish(each)) publisher_.publish_onboarded(each);
  }
  host_->finish(arrived);
}

// Everything that was computed from what an aborted step computed, an aborted step has computed: a
// row goes back to where its first one began, and what its blocks hold from there on is invalid.
Recompute Manager::abort_from(int64_t step_id) {
  const std::vector<StepJournal::Step> aborted = journal_.abort_from(step_id);
  if (aborted.empty()) return {};
  Invalidation invalid(invalidation_context(), /*by_hash=*/false);
  for (const StepJournal::Step& step : aborted) {
    for (const StepJournal::Served& served : step.rows) {
      if (!rows_.is_still(served.row, served.admission)) continue;
      invalid.limit_row(served.row, served.start);
      resend(served.row);
    }
    for (const StepJournal::Swapped& swapped : step.swapped) {
      if (rows_.is_still(swapped.row, swapped.admission)) invalid.limit_row(swapped.row, 0);
    }
    if (host_ != nullptr) {
      host_->pages().evict(step.written.data(), static_cast<int64_t>(step.written.size()));
    }
    for (int32_t row : step.clear_rows) {
      if (rows_.is_in_use(row) && rows_[row].by_step) {
        resend(row);
      } else {
        plan_.clear_later(row);
      }
    }
  }
  for (const StepJournal::Step& step : aborted) {
    for (const StepJournal::Published& each : step.published) add_published(each, &invalid);
  }
  // Nothing reads any more for these steps.
  frees_.forget_aborted();
  if (host_ != nullptr) host_->finish(host_->take_aborted(steps().last_issued));
  frees_.release_completed();
  invalid.spread();
  const std::vector<BlockId> blocks = invalid.blocks();
  release_.note_forgotten();
  pool_.evict(blocks.data(), static_cast<int64_t>(blocks.size()));
  return recompute(invalid.limits());
}

// Blocks that an aborted step made findable, unless they were computed before.
void Manager::add_published(const StepJournal::Published& published, Invalidation* invalid) const {
  if (pool_.generation(published.id) != published.generation) return;
  int64_t num_valid = 0;  // of a row that has left, nothing is known
  if (rows_.is_still(published.row, published.admission)) {
    const auto limit = invalid->limits().find(published.row);
    const int64_t end = published.first_token + groups_[published.group].block_size;
    if (limit == invalid->limits().end() || end <= limit->second) return;
    num_valid = std::max(limit->second, published.first_token);
  }
  invalid->add_block(published.id, num_valid);
}

Recompute Manager::invalidate_blocks(const std::vector<BlockId>& ids,
                                     const std::vector<BlockId>& pages) {
  Invalidation invalid(invalidation_context(), /*by_hash=*/true);
  invalid.add_failed(ids, pages);
  invalid.spread();
  const InvalidChains chains = invalid.chains();
  release_.note_forgotten();
  pool_.evict_derived(chains, are_uniform(groups_));
  if (host_ != nullptr) host_->pages().evict_derived(chains, are_uniform(groups_));
  return recompute(invalid.limits());
}

InvalidationContext Manager::invalidation_context() const {
  return {&groups_, hash_block_size_, &pool_, host_.get(), &rows_, &journal_};
}

// Rows whose valid tokens end before what they have computed go back to that end, or, where their
// own blocks do not hold all that they read from there, start anew.
Recompute Manager::recompute(const Invalidation::Limits& limits) {
  Recompute out;
  std::vector<int32_t> to_restart;
  for (const auto& [row, limit] : limits) {
    if (limit >= rows_[row].num_computed) continue;
    out.rows.push_back(row);
    if (!rows_[row].on_host && release_.can_resume(row, limit)) {
      release_.truncate(row, limit);
      publisher_.refresh(row);
    } else {
      release_.release_row(row, /*with_encoder=*/false);
      to_restart.push_back(row);
    }
    if (rows_[row].by_step) resend(row);
  }
  for (int32_t row : to_restart) restart(row);
  for (int32_t row : out.rows) {
    out.num_computed_tokens.push_back(static_cast<int32_t>(rows_[row].num_computed));
  }
  return out;
}

// The row has released its blocks; it goes on from what the device's cache has. What was swapped
// out of an encoder stays there: its pages come back with the row.
void Manager::restart(int32_t row) {
  Row& r = rows_[row];
  r.on_host = r.on_host && r.chain->num_encoder_tokens() > 0;
  r.has_forked = r.may_share = false;
  const PrefixHit& hit = find(*r.chain, /*with_partial=*/false, /*with_host=*/false);
  for (const CacheGroup& group : groups_) {
    if (group.is_cacheable()) RowGrowth::set_hit(&rows_.blocks(row)[group.id], group, hit);
  }
  ServedRow served;
  served.row = row;
  growth_.take_hit(&served, hit);
  r.num_computed = r.start = hit.num_tokens;
  r.is_stale = false;
  publisher_.refresh(row);
}

void Manager::resend(int32_t row) {
  if (rows_[row].by_step) plan_.resend(row);
}

}  // namespace kvcache
