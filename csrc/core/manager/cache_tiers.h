// SPDX-License-Identifier: Apache-2.0
// The two block tiers: the device pool and, if configured, the host pool.
//
// Invariants: only rows, onboards and fences hold references to blocks or pages, and the clocks of
// both tiers agree.
#pragma once

#include <cstdint>
#include <memory>

#include "core/errors.h"
#include "core/listeners/event_log.h"
#include "core/listeners/lost_blocks.h"
#include "core/manager/cache_stats.h"
#include "core/manager/clock.h"
#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/options.h"
#include "core/manager/steps.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"

namespace kvcache {

class CacheTiers {
 public:
  // Offloads and onboards of the host tier are added to the plans of `steps`. Throws
  // std::invalid_argument, naming the option, if a pool cannot be created.
  CacheTiers(const ManagerSetup* setup, Steps* steps);
  CacheTiers(const CacheTiers&) = delete;
  CacheTiers& operator=(const CacheTiers&) = delete;

  BlockPool& pool() { return pool_; }
  const BlockPool& pool() const { return pool_; }
  // Null without a host tier.
  HostTier* host() { return host_.get(); }
  const HostTier* host() const { return host_.get(); }
  BlockPool* host_pages() { return host_ ? &host_->pages() : nullptr; }
  const BlockPool* host_pages() const { return host_ ? &host_->pages() : nullptr; }
  DeferredFrees& frees() { return frees_; }
  const DeferredFrees& frees() const { return frees_; }
  const Clock& clock() const { return clock_; }
  // The device's policy if it compares the hits of requests in simulated caches; otherwise null.
  Learned* compared() { return compared_; }

  // Makes both pools record in `lost` the blocks that leave the cache.
  void record_lost(LostBlocks* lost) { add_recorders<LossRecorder>(lost); }

  // Makes both pools share the soundness state of their manager.
  void share(Soundness* soundness) {
    pool_.share(soundness);
    if (host_ != nullptr) host_->pages().share(soundness);
  }

  // Sets the clock (see Clock::set) and notifies both pools.
  void set_now(int64_t ms) {
    clock_.set(ms);
    notify_clock();
  }
  void read_clock() {
    if (clock_.read()) notify_clock();
  }

  const EventLog::Drained& events() const { return events_.waiting(); }
  EventLog::Drained drain_events() { return events_.drain(); }
  void start_epoch() { ++num_epochs_; }
  int64_t num_epochs() const { return num_epochs_; }
  void note_invalid() { ++num_invalidations_; }
  int64_t num_invalidations() const { return num_invalidations_; }
  const TierCount& counts() const {
    static const TierCount kNone;
    return host_ == nullptr ? kNone : host_->counts();
  }
  void clear_counts() {
    if (host_ != nullptr) *host_->mutable_counts() = {};
  }

  // Number of cached blocks that wait to be written to the host.
  size_t num_queued() const { return host_ == nullptr ? 0 : host_->num_queued(); }
  // Adds writes of the first n queued blocks to the plan of the current step.
  void offload_queued(size_t n) {
    if (n == 0) return;
    host_->offload_queued(n, /*holds_blocks=*/frees_.defers(steps_->numbers().num_steps));
  }
  // Called at the end of a step. The blocks that its plan reads are released after the plan has
  // run.
  void release_read() {
    frees_.release_or_defer(steps_->plan().take_held(), steps_->numbers().num_steps);
  }

  // Whether any block is held, on either tier.
  bool any_held() const {
    const auto any = [](const BlockPool& pool) { return pool.num_free() != pool.num_total(); };
    return any(pool_) || (host_ != nullptr && any(host_->pages()));
  }

  // Checks reference counts, given the references that rows hold on the device and on the host.
  // Throws std::logic_error.
  void check_invariants(PerBlock<int32_t> device, PerBlock<int32_t> host) const {
    pool_.check_invariants();
    frees_.check_invariants(&device);
    if (host_ != nullptr) {
      host_->pages().check_invariants();
      host_->check_invariants(&device, &host);
      compare(host_->pages(), host, "host page");
    }
    compare(pool_, device, "block");
  }

 private:
  static void compare(const BlockPool& pool, const PerBlock<int32_t>& counted, const char* what) {
    for (BlockId id = 1; id < pool.num_blocks(); ++id) {
      require(counted[id] == pool.ref_count(id), what, " ", id, " has ", pool.ref_count(id),
              " references, but ", counted[id], " are held");
    }
  }
  template <class Recorder, class Target>
  void add_recorders(Target* target) {
    const auto add = [&](BlockPool* pool, Tier tier) {
      recorders_.push_back(std::make_unique<Recorder>(target, tier));
      pool->add_listener(recorders_.back().get());
    };
    add(&pool_, Tier::kDevice);
    if (host_ != nullptr) add(&host_->pages(), Tier::kHost);
  }
  void notify_clock() {
    const int64_t ms = clock_.now_ms();
    pool_.set_now(ms);
    if (host_ != nullptr) host_->pages().set_now(ms);
  }

  Steps* steps_;
  BlockPool pool_;
  DeferredFrees frees_;
  std::unique_ptr<HostTier> host_;
  Clock clock_;
  EventLog events_;
  Learned* compared_ = nullptr;
  int64_t num_epochs_ = 0, num_invalidations_ = 0;
  std::vector<std::unique_ptr<BlockListener>> recorders_;
};

}  // namespace kvcache
