// SPDX-License-Identifier: Apache-2.0
// Notifies the listeners of a pool.
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/pool/block_pool.h"

namespace kvcache {

void BlockPool::add_listener(BlockListener* listener) {
  check_caller("add_listener");
  const bool order_listens = dynamic_cast<const BlockListener*>(order()) != nullptr;
  listeners_.insert(listeners_.end() - order_listens, listener);
  is_plain_ = false;
}

void BlockPool::fail_in_listener(const char* call) {
  throw std::logic_error("`" + std::string(call) +
                         "` was called by a listener of this pool: expected no change of the pool "
                         "while its listeners are notified");
}

template <class Event>
void BlockPool::tell(void (BlockListener::*method)(const Event&), const Event& event) {
  is_notifying_ = true;
  for (BlockListener* listener : listeners_) {
    try {
      (listener->*method)(event);
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
  }
  is_notifying_ = false;
}
template void BlockPool::tell(void (BlockListener::*)(const Published&), const Published&);

void BlockPool::rethrow_listener_failure() {
  if (!failure_) return;
  try {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (const std::bad_alloc&) {
    throw;  // without blame: the cause is reported as memory that ran out
  } catch (...) {
    soundness_->blame("a listener failed");
    throw;
  }
}

void BlockPool::tell_forgotten(Forgotten::Why why, const Blocks& blocks) {
  for (const BlockId id : blocks) partial_.forget(id);
  tell(&BlockListener::on_forget, Forgotten{blocks, why, flags_.data(), blocks_.data()});
  // Forgotten after the notification, because listeners that copy the blocks read their variants.
  for (const BlockId id : blocks) variants_.forget(id);
  rethrow_listener_failure();
}

// Notifies the listeners of the blocks that a release has added to the free lists, after these
// blocks.
void BlockPool::tell_released(BlockId last_cached, BlockId last_uncached) {
  const auto added = [&](const FreeList& list, BlockId last) {
    batch_.clear();
    BlockId id = last == kNullBlock ? list.head() : links_[last].next;
    for (; id != kNullBlock; id = links_[id].next) batch_.push_back(id);
    return Blocks(batch_);
  };
  if (const Blocks freed = added(uncached_free_, last_uncached); freed.n > 0) {
    tell(&BlockListener::on_forget,
         Forgotten{freed, Forgotten::Why::kFreed, /*flags=*/nullptr, blocks_.data()});
  }
  if (const Blocks idle = added(cached_free_, last_cached); idle.n > 0) {
    tell(&BlockListener::on_idle, idle);
    if (candidates_) update_candidates(idle.ids, idle.n);
  }
  rethrow_listener_failure();
}

void BlockPool::notify(const Hit& hit) {
  if (listeners_.empty()) return;
  for (const BlockId id : hit) {
    if (hit.by == Hit::By::kOtherTier) check_copy(id);
    if (is_cached(at(id, "ids"))) continue;
    throw_invalid("ids holds block ", id, ", which is not cached: expected a cached block");
  }
  const Soundness::Change change = this->change("hit");
  tell(&BlockListener::on_hit, hit);
  rethrow_listener_failure();
}

void BlockPool::notify(const Released& released) {
  if (listeners_.empty() || released.n == 0) return;
  check_released(released);
  const Soundness::Change change = this->change("release");
  tell(&BlockListener::on_release, released);
  rethrow_listener_failure();
}

void BlockPool::check_released(const Released& released) const {
  for (const BlockId id : released) check_id(id, "ids");
  if (released.features == nullptr) return;
  const ReleaseFeatures& features = *released.features;
  if (features.tokens_per_block < 1) {
    throw_invalid("tokens_per_block is ", features.tokens_per_block, ": expected 1 or more");
  }
  for (int64_t i = 0; i < released.n; ++i) {
    if (released.prefix_tokens[i] > 0) continue;
    throw_invalid("prefix_tokens[", i, "] is ", released.prefix_tokens[i], ": expected 1 or more");
  }
  for (int64_t i = 0; i < features.num_retention; ++i) {
    const Retention& each = features.retention[i];
    if (each.first < 0 || each.stop < each.first) {
      throw_invalid("retention[", i, "] covers tokens ", each.first, " to ", each.stop,
                    ": expected 0 <= first <= stop");
    }
    if (each.priority < 0 || each.priority > 100) {
      throw_invalid("retention[", i, "] has priority ", each.priority, ": expected 0 to 100");
    }
  }
}

void BlockPool::check_copy(BlockId id) const {
  if (at(id, "id").ref_count > 0 && is_cached(id)) return;
  throw_invalid("id is block ", id, ", which is not both cached and held: expected one that is");
}

void BlockPool::notify_copied_again(BlockId id, const Copied& copied) {
  check_copy(id);
  const Soundness::Change change = this->change("notify_copied_again");
  const uint8_t is_first = 0;  // it is already cached under its hash
  tell(&BlockListener::on_publish, Published{{&id, 1},
                                             copied.group,
                                             &is_first,
                                             /*content=*/nullptr,
                                             &copied,
                                             /*is_again=*/true});
  rethrow_listener_failure();
}

Access BlockPool::begin_access(double now) {
  if (!std::isfinite(now)) {
    throw_invalid("now is ", now, ": expected a finite number");
  }
  PoolClock& clock = view_.clock;
  clock.access_time = clock.num_accesses > 0 ? std::max(clock.access_time, now) : now;
  return {now, ++clock.num_accesses};
}

}  // namespace kvcache
