// SPDX-License-Identifier: Apache-2.0
#include "core/manager/deferred_frees.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/errors.h"

namespace kvcache {

DeferredFrees::DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled)
    : pool_(pool),
      steps_(steps),
      is_enabled_(is_enabled),
      waiting_(pool->num_blocks()),
      kept_of_(pool->num_blocks()) {}

void DeferredFrees::release_or_defer(const Blocks& blocks, int64_t step_id) {
  release(blocks, step_id, defers(step_id));
}

void DeferredFrees::release_after(const Blocks& blocks, int64_t step_id) {
  if (is_enabled_) step_id = std::max(step_id, steps_->last_issued);
  release(blocks, step_id, step_id >= steps_->num_completed);
}

void DeferredFrees::release(const Blocks& blocks, int64_t step_id, bool is_deferred) {
  if (blocks.n == 0) return;
  pool_->notify(Released{blocks});
  if (is_deferred) {
    add_fence(blocks, step_id);
  } else {
    pool_->release(blocks.ids, blocks.n);
  }
}

void DeferredFrees::add_fence(const Blocks& blocks, int64_t step_id) {
  // Fences are ordered by the step for which they wait. This order may differ from the order of the
  // releases.
  auto at = fences_.end();
  while (at != fences_.begin() && std::prev(at)->step_id > step_id) --at;
  fences_.insert(at, {step_id, {blocks.begin(), blocks.end()}});
  for (const BlockId id : blocks) ++waiting_[id];
  num_waiting_ += blocks.n;
}

void DeferredFrees::keep(const std::string& name, std::vector<BlockId> ids) {
  for (BlockId id : ids) ++kept_of_[id];
  num_kept_ += static_cast<int64_t>(ids.size());
  kept_.emplace(name, std::move(ids));
}

void DeferredFrees::release_kept(const std::string& name) {
  const auto found = kept_.find(name);
  const std::vector<BlockId> ids = std::move(found->second);
  kept_.erase(found);
  for (BlockId id : ids) --kept_of_[id];
  num_kept_ -= static_cast<int64_t>(ids.size());
  release_or_defer(ids);
}

void DeferredFrees::await_copies(const std::vector<BlockId>& pairs) {
  copies_.insert(copies_.end(), pairs.begin(), pairs.end());
  for (BlockId id : pairs) ++kept_of_[id];
}

std::vector<BlockId> DeferredFrees::take_copies() {
  std::vector<BlockId> pairs = std::exchange(copies_, {});
  for (BlockId id : pairs) --kept_of_[id];
  // Steps that are issued later run after the copies, so they cannot overwrite the blocks too
  // early.
  release_or_defer(pairs);
  return pairs;
}

void DeferredFrees::release_completed() {
  while (!fences_.empty() && fences_.front().step_id < steps_->num_completed) {
    const std::vector<BlockId>& ids = fences_.front().ids;
    pool_->release(ids.data(), static_cast<int64_t>(ids.size()));
    for (BlockId id : ids) --waiting_[id];
    num_waiting_ -= static_cast<int64_t>(ids.size());
    fences_.pop_front();
  }
}

void DeferredFrees::forget_aborted() {
  for (Fence& fence : fences_) fence.step_id = std::min(fence.step_id, steps_->last_issued);
}

void DeferredFrees::check_invariants(PerBlock<int32_t>* references) const {
  PerBlock<int32_t> counted(pool_->num_blocks()), kept_of(pool_->num_blocks());
  int64_t num_waiting = 0, last = -1;
  for (const Fence& fence : fences_) {
    require(fence.step_id >= last, "fences are not in the order of their steps");
    last = fence.step_id;
    num_waiting += static_cast<int64_t>(fence.ids.size());
    for (BlockId id : fence.ids) {
      ++counted[id];
      ++(*references)[id];
    }
  }
  int64_t num_kept = 0;
  for (const auto& [name, ids] : kept_) {
    num_kept += static_cast<int64_t>(ids.size());
    for (BlockId id : ids) {
      ++kept_of[id];
      ++(*references)[id];
    }
  }
  for (BlockId id : copies_) {
    ++kept_of[id];
    ++(*references)[id];
  }
  require(num_waiting == num_waiting_, "num_waiting differs from the references of fences");
  require(num_kept == num_kept_, "num_kept differs from the references under names");
  for (BlockId id = 1; id < pool_->num_blocks(); ++id) {
    require(counted[id] == waiting_[id] && kept_of[id] == kept_of_[id],
            "the reference counts of block ", id, " differ from the fences and names");
  }
}

}  // namespace kvcache
