// SPDX-License-Identifier: Apache-2.0
// Eviction in a pool with an order or pins.
//
// `cached_free_` contains all free cached blocks in release order, whether or not they are
// candidates. Eviction passes the pinned blocks at its head only once, until one of them is
// unpinned.
#include "core/errors.h"
#include "core/pool/block_pool.h"

namespace kvcache {

namespace {

[[noreturn]] void fail(BlockId id, const char* what) {
  throw_invalid("ids holds block ", id, ", which is ", what);
}

}  // namespace

void BlockPool::update_candidate(BlockId id) {
  const Block& block = blocks_[id];
  candidates_->set_idle(id, is_cached(block) && block.ref_count == 0 && !has_pin(block));
}

void BlockPool::update_candidates(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) update_candidate(ids[i]);
}

void BlockPool::unlist(BlockId id) {
  if (id == last_passed_) last_passed_ = links_[id].prev;
  list_of(blocks_[id]).remove(links_.data(), id);
}

// Evicts one block at a time, because evicting a child may make its parent the next victim.
void BlockPool::take_chosen(int64_t n, BlockId* out) {
  for (int64_t i = 0; i < n; ++i) {
    BlockId id = candidates_ ? candidates_->order().victim() : kNullBlock;
    if (id == kNullBlock) id = first_unpinned();
    if (id == kNullBlock) id = cached_free_.head();  // all are pinned
    unlist(id);
    ++evicted_by_group_[blocks_[id].group];
    flags_[i] = forget(id, /*evicted=*/true);
    out[i] = id;
  }
}

// Returns the least recently released free cached block without a pin; the null block if there is
// none.
BlockId BlockPool::first_unpinned() {
  BlockId id = last_passed_ == kNullBlock ? cached_free_.head() : links_[last_passed_].next;
  for (; id != kNullBlock && has_pin(blocks_[id]); id = links_[id].next) last_passed_ = id;
  return id;
}

uint8_t BlockPool::forget(BlockId id, bool evicted) {
  const uint64_t key = key_of(blocks_[id]);
  index_.prefetch_bucket(key);
  if (pins_) pins_->forget(id, evicted);
  changed_.clear();
  if (candidates_) candidates_->remove(id, lineage_[id].parent(), &changed_);
  const uint8_t flags = forget_hashes(id, key);
  update_changed();
  return flags;
}

void BlockPool::clear_places() {
  if (candidates_) candidates_->clear(next_fresh_);
  if (pins_) pins_->clear();
  last_passed_ = kNullBlock;
}

void BlockPool::pin(const BlockId* ids, int64_t n) {
  check_caller("pin");
  for (int64_t i = 0; i < n; ++i) {
    if (!is_cached(at(ids[i], "ids"))) fail(ids[i], "not cached: expected a cached block");
  }
  if (n > 0 && !pins_) {
    pins_ = std::make_unique<Pins>(num_blocks_);
    is_plain_ = false;
  }
  const Soundness::Change change = this->change("pin");
  for (int64_t i = 0; i < n; ++i) pins_->add(ids[i]);
  if (candidates_) update_candidates(ids, n);
}

void BlockPool::take_pins(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (has_pin(blocks_[ids[i]])) {
      pins_->take(ids[i]);
      continue;
    }
    for (int64_t j = 0; j < i; ++j) pins_->add(ids[j]);
    fail(ids[i], "pinned fewer times than it is listed: expected a pinned block");
  }
}

void BlockPool::unpin(const BlockId* ids, int64_t n) {
  check_caller("unpin");
  for (int64_t i = 0; i < n; ++i) check_id(ids[i], "ids");
  take_pins(ids, n);  // before the change, because an error within a change breaks the pool
  const Soundness::Change change = this->change("unpin");
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = blocks_[ids[i]];
    const bool may_be_passed = !has_pin(block) && block.ref_count == 0;
    if (may_be_passed) last_passed_ = kNullBlock;
  }
  if (candidates_) update_candidates(ids, n);
}

void BlockPool::add_place(BlockId id, uint64_t key, const Candidates::Parent* parent) {
  changed_.clear();
  candidates_->add(id, key, parent, &changed_);
  update_changed();
}

void BlockPool::check_places() const {
  require(is_plain_ == (!candidates_ && !pins_ && listeners_.empty()),
          "a pool is wrongly marked as plain or not plain");
  int64_t num_pinned = 0;
  for (BlockId id = 1; id < num_blocks_; ++id) {
    const Block& block = blocks_[id];
    num_pinned += has_pin(block);
    require(!has_pin(block) || is_cached(block), "a block that is not cached is pinned: ", id);
    if (!candidates_) continue;
    const bool may_go =
        is_cached(block) && block.ref_count == 0 && !has_pin(block) && candidates_->is_leaf(id);
    require(candidates_->has(id) == may_go, "the order has the wrong candidates: ", id);
  }
  require(num_pinned == this->num_pinned(), "num_pinned is wrong");
  for (BlockId id = last_passed_; id != kNullBlock; id = links_[id].prev) {
    require(has_pin(blocks_[id]) && blocks_[id].ref_count == 0,
            "passed over, but not pinned: ", id);
  }
  if (!candidates_) return;
  std::vector<BlockId> indexed;
  for (BlockId id = 1; id < next_fresh_; ++id) {
    if (is_indexed(blocks_[id])) indexed.push_back(id);
  }
  candidates_->check_invariants(indexed, [&](BlockId id) { return lineage_[id].parent(); });
}

}  // namespace kvcache
