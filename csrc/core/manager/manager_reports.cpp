// Reports on steps, which are done or came to nothing, and blocks that turned out to be invalid.
#include <vector>

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
  if (!completed) all = recovery_.abort_from(step_id);
  if (any_failed) {
    // Before the step is done: its journal knows who has used these pages and let go of them.
    const Recompute more = recovery_.invalidate(failed, failed_on_host);
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
  return recovery_.invalidate(invalid, {});
}

void Manager::complete_to(int64_t step_id) {
  journal_.complete_to(step_id);
  publish_arrived();
  frees_.release_completed();
}

// Blocks of hits on the host are found on the device once they have arrived, unless what their
// pages hold was reported invalid since.
void Manager::publish_arrived() {
  if (host_ == nullptr) return;
  const std::vector<HostTier::Onboard> arrived = host_->take_arrived(steps().num_completed);
  for (const HostTier::Onboard& each : arrived) {
    if (host_->may_publish(each)) publisher_.publish_onboarded(each);
  }
  host_->finish(arrived);
}

}  // namespace kvcache
