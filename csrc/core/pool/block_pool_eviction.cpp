// SPDX-License-Identifier: Apache-2.0
// Eviction in a pool with a policy or pins.
//
// `cached_free_` contains all free cached blocks in release order, whether or not they are
// candidates. Eviction passes the pinned blocks at its head only once, until one of them is
// unpinned.
#include <cmath>
#include <stdexcept>
#include <string>

#include "core/pool/block_pool.h"

namespace kvcache {

namespace {

[[noreturn]] void fail(BlockId id, const char* what) {
  throw std::invalid_argument("ids holds block " + std::to_string(id) + ", which is " + what);
}

}  // namespace

void BlockPool::update_candidate(BlockId id) {
  if (candidates_) update_candidate_of(id, candidates_.get());
}

inline void BlockPool::update_candidate_of(BlockId id, Candidates* candidates) {
  const Block& block = blocks_[id];
  candidates->set_idle(id, is_cached(block) && block.ref_count == 0 && !has_pin(block));
}

void BlockPool::unlist(BlockId id) {
  if (id == last_passed_) last_passed_ = links_[id].prev;
  list_of(blocks_[id]).remove(links_.data(), id);
}

// Evicts one block at a time, because evicting a child may make its parent the next victim.
void BlockPool::take_chosen(int64_t n, BlockId* out) {
  for (int64_t i = 0; i < n; ++i) {
    BlockId id = candidates_ ? chosen_candidate() : kNullBlock;
    if (id == kNullBlock) id = first_unpinned();
    if (id == kNullBlock) id = cached_free_.head();  // all are pinned
    notify_eviction(id);
    unlist(id);
    ++evicted_by_group_[blocks_[id].group];
    forget(id, /*evicted=*/true);
    out[i] = id;
  }
  num_evicted_ += n;
}

// Returns the candidate to evict; the null block if there is none. The search for the least
// recently released candidate is limited. It can fail only if many of the oldest free blocks have
// cached children.
BlockId BlockPool::chosen_candidate() {
  constexpr int kMostSearched = 64;
  EvictionPolicy& policy = candidates_->policy();
  if (!policy.prefers_least_recent()) return policy.victim();
  BlockId id = first_unpinned();
  for (int i = 0; i < kMostSearched && id != kNullBlock; ++i, id = links_[id].next) {
    if (candidates_->has(id)) return id;
  }
  return policy.victim();
}

// Returns the least recently released free cached block without a pin; the null block if there is
// none.
BlockId BlockPool::first_unpinned() {
  BlockId id = last_passed_ == kNullBlock ? cached_free_.head() : links_[last_passed_].next;
  for (; id != kNullBlock && has_pin(blocks_[id]); id = links_[id].next) last_passed_ = id;
  return id;
}

void BlockPool::forget_place(BlockId id, bool evicted) {
  const Block& block = blocks_[id];
  if (pins_) pins_->forget(id, evicted);
  if (!candidates_) return;
  candidates_->set_idle(id, false);
  candidates_->policy().on_forget(id, hash_of(id), block.group, evicted);
  changed_.clear();
  candidates_->tree().remove(id, lineage_[id].parent(), &changed_);
}

// Updates blocks that have become leaves, or are no longer leaves, because another block was added
// or removed.
void BlockPool::update_changed() {
  for (BlockId other : changed_) update_candidate_of(other, candidates_.get());
}

void BlockPool::clear_places() {
  if (candidates_) candidates_->clear();
  if (pins_) pins_->clear();
  last_passed_ = kNullBlock;
}

void BlockPool::pin(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!is_cached(at(ids[i], "ids"))) fail(ids[i], "not cached: expected a cached block");
  }
  if (n > 0 && !pins_) {
    pins_ = std::make_unique<Pins>(num_blocks_);
    is_plain_ = false;
  }
  const Soundness::Change change = this->change("pin");
  for (int64_t i = 0; i < n; ++i) {
    pins_->add(ids[i]);
    update_candidate(ids[i]);
  }
}

void BlockPool::unpin(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) at(ids[i], "ids");
  for (int64_t i = 0; i < n; ++i) {
    if (has_pin(blocks_[ids[i]])) {
      pins_->take(ids[i]);
      continue;
    }
    for (int64_t j = 0; j < i; ++j) pins_->add(ids[j]);
    fail(ids[i], "pinned fewer times than it is listed: expected a pinned block");
  }
  const Soundness::Change change = this->change("unpin");
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = blocks_[ids[i]];
    if (has_pin(block)) continue;
    if (block.ref_count == 0) last_passed_ = kNullBlock;  // may be one of the passed blocks
    update_candidate(ids[i]);
  }
}

void BlockPool::check_ids(const BlockId* ids, int64_t n) const {
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] <= kNullBlock || ids[i] >= num_blocks_) at(ids[i], "ids");
  }
}

void BlockPool::notify_hit(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!is_cached(at(ids[i], "ids"))) fail(ids[i], "not cached: expected a cached block");
  }
  const Soundness::Change change = this->change("hit");
  candidates_->policy().on_hit(ids, n);
}

void BlockPool::notify_policy_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                                      const ReleaseFeatures& features) {
  check_ids(ids, n);
  if (features.tokens_per_block < 1) {
    throw std::invalid_argument("tokens_per_block is " + std::to_string(features.tokens_per_block) +
                                ": expected 1 or more");
  }
  for (int64_t i = 0; i < n; ++i) {
    if (prefix_tokens[i] > 0) continue;
    throw std::invalid_argument("prefix_tokens[" + std::to_string(i) + "] is " +
                                std::to_string(prefix_tokens[i]) + ": expected 1 or more");
  }
  for (int64_t i = 0; i < features.num_retention; ++i) {
    const Retention& each = features.retention[i];
    const std::string name = "retention[" + std::to_string(i) + "]";
    if (each.first < 0 || each.stop < each.first) {
      throw std::invalid_argument(name + " covers tokens " + std::to_string(each.first) + " to " +
                                  std::to_string(each.stop) + ": expected 0 <= first <= stop");
    }
    if (each.priority < 0 || each.priority > 100) {
      throw std::invalid_argument(name + " has priority " + std::to_string(each.priority) +
                                  ": expected 0 to 100");
    }
  }
  const Soundness::Change change = this->change("notify_release");
  candidates_->policy().on_release(ids, prefix_tokens, n, features);
}

void BlockPool::check_copy(BlockId id) const {
  if (at(id, "id").ref_count > 0 && is_cached(id)) return;
  throw std::invalid_argument("id is block " + std::to_string(id) +
                              ", which is not both cached and held: expected one that is");
}

void BlockPool::copy_again(BlockId id, const Copied& copied) {
  check_copy(id);
  if (!has_policy()) return;
  const Soundness::Change change = this->change("copy_again");
  candidates_->policy().on_copy(id, copied.released_as);
}

void BlockPool::notify_load(BlockId id) {
  check_copy(id);
  if (!has_policy()) return;
  const Soundness::Change change = this->change("notify_load");
  candidates_->policy().on_load(id);
}

double BlockPool::gain_of_copy(const Copied& copied) {
  if (!has_policy()) return 1;
  const bool evicts = uncached_free_.head() == kNullBlock && next_fresh_ == num_blocks_;
  return candidates_->policy().gain_of_copy(copied.released_as, evicts);
}

Access BlockPool::begin_access(double now) {
  if (!std::isfinite(now)) {
    throw std::invalid_argument("now is " + std::to_string(now) + ": expected a finite number");
  }
  if (!has_policy()) return {};
  const Soundness::Change change = this->change("access");
  return candidates_->policy().begin_access(now);
}

void BlockPool::notify_access(const BlockId* ids, int64_t n, const Access& access) {
  check_ids(ids, n);
  const Soundness::Change change = this->change("access");
  candidates_->policy().on_access(ids, n, access);
}

void BlockPool::notify_published(BlockId id, BlockId parent, bool has_parent, bool is_first) {
  const Block& block = blocks_[id];
  const uint64_t parent_tag = lineage_[id].parent();
  changed_.clear();
  candidates_->tree().add(id, parent, has_parent ? &parent_tag : nullptr, &changed_);
  update_changed();
  candidates_->policy().on_publish(id, &block.hash, block.group, is_first);
}

std::vector<CacheTree::Member> BlockPool::published() const {
  std::vector<CacheTree::Member> members;
  for (BlockId id = 1; id < next_fresh_; ++id) {
    const Block& block = blocks_[id];
    if (is_indexed(block)) members.push_back({id, tag_of(block.hash), lineage_[id].parent()});
  }
  return members;
}

// Notifies the policy of the blocks after `last`, which a release has just added to the list.
void BlockPool::notify_idle(BlockId last) {
  BlockId id = last == kNullBlock ? cached_free_.head() : links_[last].next;
  for (; id != kNullBlock; id = links_[id].next) {
    candidates_->policy().on_idle(id);
    update_candidate_of(id, candidates_.get());
  }
}

void BlockPool::check_places() const {
  const auto require = [](bool ok, const char* what, int64_t id) {
    if (!ok) throw std::logic_error(std::string(what) + " (block " + std::to_string(id) + ")");
  };
  require(is_plain_ == (!candidates_ && !pins_), "a pool is wrongly marked as plain or not plain",
          0);
  int64_t num_pinned = 0;
  for (BlockId id = 1; id < num_blocks_; ++id) {
    const Block& block = blocks_[id];
    num_pinned += has_pin(block);
    require(!has_pin(block) || is_cached(block), "a block that is not cached is pinned", id);
    if (!candidates_) continue;
    const bool may_go = is_cached(block) && block.ref_count == 0 && !has_pin(block) &&
                        candidates_->tree().is_leaf(id);
    require(candidates_->has(id) == may_go, "the policy has the wrong candidates", id);
  }
  require(num_pinned == this->num_pinned(), "num_pinned is wrong", 0);
  for (BlockId id = last_passed_; id != kNullBlock; id = links_[id].prev) {
    require(has_pin(blocks_[id]) && blocks_[id].ref_count == 0, "passed over, but not pinned", id);
  }
  if (candidates_) candidates_->tree().check_invariants(published());
}

}  // namespace kvcache
