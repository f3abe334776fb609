// SPDX-License-Identifier: Apache-2.0
// Released blocks that may still be read.
//
// They are held for steps in flight (fences), for connectors (under names, or block by block), or
// for copies that the caller has not taken. Invariant: the per-block counts equal these references.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"

namespace kvcache {

class DeferredFrees {
 public:
  // Without `is_enabled`, a release is deferred only on explicit request, because the order of the
  // CUDA stream protects the reads of steps in flight.
  DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled)
      : pool_(pool),
        steps_(steps),
        is_enabled_(is_enabled),
        waiting_(pool->num_blocks()),
        kept_of_(pool->num_blocks()) {}

  // Whether blocks that this step reads must be held until the step is reported as done.
  bool defers(int64_t step_id) const { return is_enabled_ && step_id >= steps_->num_completed; }

  // Removes one reference from each block, in the given order, immediately or when step `step_id`
  // is done.
  void release_or_defer(const Blocks& blocks, int64_t step_id) {
    release(blocks, step_id, defers(step_id));
  }
  // Releases blocks that no step after the last issued step reads.
  void release_or_defer(const Blocks& blocks) { release_or_defer(blocks, steps_->last_issued); }

  // Removes the references when step `step_id` is done, even if deferral is not enabled.
  void release_after(const Blocks& blocks, int64_t step_id) {
    if (is_enabled_) step_id = std::max(step_id, steps_->last_issued);
    release(blocks, step_id, step_id >= steps_->num_completed);
  }

  // Keeps one reference to each block under this name, which must be new, until release_kept is
  // called.
  void keep(const std::string& name, std::vector<BlockId> ids) {
    for (BlockId id : ids) ++kept_of_[id];
    num_kept_ += static_cast<int64_t>(ids.size());
    kept_.emplace(name, std::move(ids));
  }
  bool keeps(const std::string& name) const { return kept_.count(name) != 0; }
  void release_kept(const std::string& name) {
    const std::vector<BlockId> ids = std::move(kept_.extract(name).mapped());
    for (BlockId id : ids) --kept_of_[id];
    num_kept_ -= static_cast<int64_t>(ids.size());
    release_or_defer(ids);
  }

  // Adds a reference to each of these held or cached blocks until release_held is called. Ids may
  // repeat. Throws, without any change, on another block.
  void hold(const Blocks& blocks) {
    pool_->retain(blocks.ids, blocks.n);
    for (const BlockId id : blocks) {
      ++held_[id];
      ++kept_of_[id];
    }
    num_kept_ += blocks.n;
  }
  // The number of references that `hold` has added to a block.
  int64_t num_holds_of(BlockId id) const {
    const auto found = held_.find(id);
    return found == held_.end() ? 0 : found->second;
  }
  // Removes references that `hold` has added, in the given order.
  void release_held(const Blocks& blocks) {
    for (const BlockId id : blocks) {
      const auto found = held_.find(id);
      if (--found->second == 0) held_.erase(found);
      --kept_of_[id];
    }
    num_kept_ -= blocks.n;
    release_or_defer(blocks);
  }

  // Takes over one reference to the source and to the destination of each copy, until take_copies
  // is called.
  void await_copies(const std::vector<BlockId>& pairs) {
    copies_.insert(copies_.end(), pairs.begin(), pairs.end());
    for (BlockId id : pairs) ++kept_of_[id];
  }
  // Returns the pending (source, destination) pairs in order of arrival, and removes them.
  std::vector<BlockId> take_copies() {
    std::vector<BlockId> pairs = std::exchange(copies_, {});
    for (BlockId id : pairs) --kept_of_[id];
    // Steps that are issued later run after the copies, so they cannot overwrite the blocks too
    // early.
    release_or_defer(pairs);
    return pairs;
  }
  bool awaits_copies() const { return !copies_.empty(); }

  // Releases the blocks that wait for completed steps.
  void release_completed() {
    while (!fences_.empty() && fences_.front().step_id < steps_->num_completed) {
      const std::vector<BlockId>& ids = fences_.front().ids;
      pool_->release(ids.data(), static_cast<int64_t>(ids.size()));
      for (BlockId id : ids) --waiting_[id];
      num_waiting_ -= static_cast<int64_t>(ids.size());
      fences_.pop_front();
    }
  }
  // Called after steps have been aborted. Blocks that wait for an aborted step wait for the last
  // issued step instead.
  void forget_aborted() {
    for (Fence& fence : fences_) fence.step_id = std::min(fence.step_id, steps_->last_issued);
  }

  int64_t num_waiting() const { return num_waiting_; }  // references held by fences
  int64_t num_kept() const { return num_kept_; }        // references of `keep` and `hold`
  int32_t num_waiting_of(BlockId id) const { return waiting_[id]; }
  int32_t num_kept_of(BlockId id) const { return kept_of_[id]; }

  // Adds the references held by this object to `references`. Throws std::logic_error if the counts
  // are wrong.
  void check_invariants(PerBlock<int32_t>* references) const {
    PerBlock<int32_t> waiting(pool_->num_blocks()), kept_of(pool_->num_blocks());
    const auto count = [&](const std::vector<BlockId>& ids, PerBlock<int32_t>* own) {
      for (const BlockId id : ids) {
        ++(*own)[id];
        ++(*references)[id];
      }
    };
    int64_t num_waiting = 0, num_kept = 0, last = -1;
    for (const Fence& fence : fences_) {
      require(fence.step_id >= last, "fences are not in the order of their steps");
      last = fence.step_id;
      num_waiting += static_cast<int64_t>(fence.ids.size());
      count(fence.ids, &waiting);
    }
    for (const auto& [name, ids] : kept_) {
      num_kept += static_cast<int64_t>(ids.size());
      count(ids, &kept_of);
    }
    for (const auto& [id, n] : held_) {
      require(n > 0, "a block is held 0 times: ", id);
      num_kept += n;
      count(std::vector<BlockId>(static_cast<size_t>(n), id), &kept_of);
    }
    count(copies_, &kept_of);
    require(num_waiting == num_waiting_, "num_waiting differs from the references of fences");
    require(num_kept == num_kept_, "num_kept differs from the references of connectors");
    for (BlockId id = 1; id < pool_->num_blocks(); ++id) {
      require(waiting[id] == waiting_[id] && kept_of[id] == kept_of_[id],
              "the reference counts of block ", id, " differ from the fences and connectors");
    }
  }

 private:
  struct Fence {
    int64_t step_id;
    std::vector<BlockId> ids;
  };

  void release(const Blocks& blocks, int64_t step_id, bool is_deferred) {
    if (blocks.n == 0) return;
    pool_->notify(Released{blocks});
    if (is_deferred) {
      add_fence(blocks, step_id);
    } else {
      pool_->release(blocks.ids, blocks.n);
    }
  }
  void add_fence(const Blocks& blocks, int64_t step_id) {
    // Fences are ordered by the step for which they wait. This order may differ from the order of
    // the releases.
    auto at = fences_.end();
    while (at != fences_.begin() && std::prev(at)->step_id > step_id) --at;
    fences_.insert(at, {step_id, {blocks.begin(), blocks.end()}});
    for (const BlockId id : blocks) ++waiting_[id];
    num_waiting_ += blocks.n;
  }

  BlockPool* pool_;
  const StepNumbers* steps_;
  bool is_enabled_;
  std::deque<Fence> fences_;  // ordered by step
  std::unordered_map<std::string, std::vector<BlockId>> kept_;
  std::unordered_map<BlockId, int64_t> held_;  // references of `hold`
  std::vector<BlockId> copies_;                // (source, destination) pairs
  PerBlock<int32_t> waiting_;                  // references held by fences
  PerBlock<int32_t> kept_of_;                  // references of connectors and of copies
  int64_t num_waiting_ = 0, num_kept_ = 0;
};

}  // namespace kvcache
