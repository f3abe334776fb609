#include "core/manager/deferred_frees.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace kvcache {

DeferredFrees::DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled)
    : pool_(pool),
      steps_(steps),
      is_enabled_(is_enabled),
      waiting_(is_enabled ? pool->num_blocks() : 0) {}

void DeferredFrees::release_or_defer(const BlockId* ids, int64_t n, int64_t step_id) {
  if (n == 0) return;
  pool_->notify_released(ids, n);
  if (!defers(step_id)) {
    pool_->release(ids, n);
    return;
  }
  // In the order of their ends: what a step reads may be released before what it lets go of.
  auto at = fences_.end();
  while (at != fences_.begin() && std::prev(at)->step_id > step_id) --at;
  fences_.insert(at, {step_id, {ids, ids + n}});
  for (int64_t i = 0; i < n; ++i) ++waiting_[ids[i]];
  num_waiting_ += n;
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
  PerBlock<int32_t> counted(pool_->num_blocks());
  int64_t num_waiting = 0, last = -1;
  for (const Fence& fence : fences_) {
    if (fence.step_id < last) throw std::logic_error("fences are not in the order of their steps");
    last = fence.step_id;
    num_waiting += static_cast<int64_t>(fence.ids.size());
    for (BlockId id : fence.ids) {
      ++counted[id];
      ++(*references)[id];
    }
  }
  if (num_waiting != num_waiting_) throw std::logic_error("num_waiting is not what fences hold");
  for (BlockId id = 1; id < pool_->num_blocks() && !waiting_.empty(); ++id) {
    if (counted[id] != waiting_[id]) {
      throw std::logic_error("fences hold block " + std::to_string(id) +
                             " another number of times");
    }
  }
}

}  // namespace kvcache
