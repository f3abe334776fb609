// The two tiers of blocks: the device's pool and, where there is one, the host's.
//
// One clock and one log of events for both. Released blocks of the device that a step may still
// read wait here, too.
// Invariant: a block or page has as many references as rows, onboards and fences hold; the tiers
// agree on the time.
#pragma once

#include <cstdint>
#include <memory>

#include "core/manager/block_holders.h"
#include "core/manager/cache_stats.h"
#include "core/manager/clock.h"
#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/options.h"
#include "core/manager/steps.h"
#include "core/pool/block_pool.h"
#include "core/pool/event_log.h"
#include "core/pool/per_block.h"

namespace kvcache {

class CacheTiers {
 public:
  // Offloads and onboards of the host tier go into the plans of `steps`. Throws
  // std::invalid_argument that names the option which no pool can be made of.
  CacheTiers(const ManagerSetup* setup, Steps* steps);
  CacheTiers(const CacheTiers&) = delete;
  CacheTiers& operator=(const CacheTiers&) = delete;

  BlockPool& pool() { return pool_; }
  const BlockPool& pool() const { return pool_; }
  // Null where there is none.
  HostTier* host() { return host_.get(); }
  const HostTier* host() const { return host_.get(); }
  BlockPool* host_pages() { return host_ ? &host_->pages() : nullptr; }
  const BlockPool* host_pages() const { return host_ ? &host_->pages() : nullptr; }
  DeferredFrees& frees() { return frees_; }
  const DeferredFrees& frees() const { return frees_; }
  BlockHolders holders() const { return {&pool_, &frees_, host_.get(), &steps_->plan()}; }
  const Clock& clock() const { return clock_; }

  // Both pools are as sound as their manager.
  void share(Soundness* soundness) {
    pool_.share(soundness);
    if (host_ != nullptr) host_->pages().share(soundness);
  }

  // As Clock says; both pools are notified.
  void set_now(int64_t ms) {
    clock_.set(ms);
    notify_clock();
  }
  void read_clock() {
    if (clock_.read()) notify_clock();
  }

  const EventLog::Drained& events() const { return events_.waiting(); }
  EventLog::Drained drain_events() { return events_.drain(); }
  const TierCount& counts() const;
  void clear_counts();  // and residency times

  // Within a step: the first n cached blocks that wait for it go to the host.
  size_t num_queued() const { return host_ == nullptr ? 0 : host_->num_queued(); }
  void offload_queued(size_t n, const StepFills& fills);
  // At a step's end: blocks that its plan reads are released behind it.
  void release_read();

  bool any_held() const;  // on any tier

  // With the references that rows hold, of the device and of the host. Throws std::logic_error.
  void check_invariants(PerBlock<int32_t> device, PerBlock<int32_t> host) const;

 private:
  void notify_clock();

  Steps* steps_;
  BlockPool pool_;
  DeferredFrees frees_;
  std::unique_ptr<HostTier> host_;
  Clock clock_;
  EventLog events_;
};

}  // namespace kvcache
