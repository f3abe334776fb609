// SPDX-License-Identifier: Apache-2.0
#include "core/manager/cache_tiers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/eviction/learned.h"
#include "core/eviction/registry.h"

namespace kvcache {

namespace {

// Returns null for the pool's built-in order, least recently released first.
std::unique_ptr<EvictionOrder> policy_of(const Eviction& eviction, int64_t num_blocks) {
  if (eviction.make) return eviction.make(num_blocks);
  return make_eviction_policy(eviction.policy, eviction.options, num_blocks);
}

std::unique_ptr<BlockPool> pages_of(const ManagerOptions& options, const BlockPool& device) {
  const Eviction& eviction = options.host_eviction;
  const int64_t n = options.num_host_blocks;
  auto policy = eviction.make ? eviction.make(n)
                              : make_host_eviction_policy(eviction.policy, eviction.options, n,
                                                          device.order());
  return std::make_unique<BlockPool>(n, std::move(policy));
}

std::unique_ptr<HostTier> host_of(const ManagerOptions& options, const HostTier::Context& context) {
  if (options.num_host_blocks == 0) return nullptr;
  return std::make_unique<HostTier>(pages_of(options, *context.device), context,
                                    options.host_writes);
}

bool asks_for_time(const ManagerOptions& options, const BlockPool& pool, const BlockPool* pages) {
  return options.explain_misses > 0 || pool.order() != nullptr ||
         (pages != nullptr && pages->order() != nullptr);
}

// Whether a hit may need windows or states.
bool has_side_groups(const std::vector<CacheGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.is_cached && !group.keeps_all; });
}

}  // namespace

CacheTiers::CacheTiers(const ManagerSetup* setup, Steps* steps)
    : steps_(steps),
      pool_(setup->options.num_blocks,
            policy_of(setup->options.eviction, setup->options.num_blocks)),
      frees_(&pool_, &steps->numbers(), setup->options.fence_frees),
      host_(host_of(setup->options, {&pool_, &setup->groups, &steps->plan()})),
      clock_(asks_for_time(setup->options, pool_, host_pages())) {
  if (host_ != nullptr) pool_.add_listener(host_.get());
  if (setup->options.record_events) add_recorders<EventRecorder>(&events_);
  // The host adds to the blocks that a policy keeps if all evicted blocks are written to it.
  const HostWrites& writes = setup->options.host_writes;
  const int64_t num_host_blocks =
      writes.is_through || writes.min_gain ? 0 : setup->options.num_host_blocks;
  auto* learned = dynamic_cast<Learned*>(pool_.order());
  if (learned == nullptr) return;
  if (has_side_groups(setup->groups)) {
    compared_ = learned;
    learned->compare(Duel::By::kRequest, num_host_blocks);
  } else if (num_host_blocks > 0) {
    learned->compare(Duel::By::kSimulation, num_host_blocks);
  }
}

}  // namespace kvcache
