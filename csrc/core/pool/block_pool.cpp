// SPDX-License-Identifier: Apache-2.0
#include "core/pool/block_pool.h"

#include <numeric>

#include "core/errors.h"

namespace kvcache {

namespace {

// Number of blocks by which a batch loop prefetches ahead. Cache misses are hidden by the work on
// earlier blocks.
constexpr int64_t kPrefetchBlocks = 8;

// Marks a block that is about to be published, in a link that unindexed blocks do not use.
constexpr BlockId kMarked = -1;

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, std::unique_ptr<EvictionOrder> order)
    : num_blocks_(checked_size("num_blocks", num_blocks, 2, " (the null block is counted)")),
      blocks_(static_cast<size_t>(num_blocks)),
      links_(static_cast<size_t>(num_blocks)),
      lineage_(static_cast<size_t>(num_blocks)),
      index_(blocks_.data(), num_blocks),
      num_free_(num_blocks - 1),
      view_{{blocks_.data(), &epoch_}, {}} {
  if (order == nullptr) return;
  order->attach(&view_);
  if (auto* listener = dynamic_cast<BlockListener*>(order.get())) listeners_.push_back(listener);
  candidates_ = std::make_unique<Candidates>(std::move(order), &index_, blocks_.data(), num_blocks);
  is_plain_ = false;
}

size_t BlockPool::num_bytes() const {
  return sizeof(*this) + blocks_.num_bytes() + links_.num_bytes() + lineage_.num_bytes() +
         index_.num_bytes() + (candidates_ ? candidates_->num_bytes() : 0) +
         (pins_ ? pins_->num_bytes() : 0);
}

const Block& BlockPool::at(BlockId id, const char* what) const {
  if (!has(id)) {
    throw_invalid(what, " holds block ", id, ": expected 1 to ", num_blocks_ - 1);
  }
  return blocks_[id];
}

void BlockPool::set_cached(BlockId id, uint8_t group, uint64_t parent, uint32_t root) {
  Block& block = blocks_[id];
  block.older = block.younger = kNullBlock;
  block.group = group;
  block.epoch = epoch_;
  lineage_[id].set_parent(parent);
  lineage_[id].root = root;
  ++num_cached_;
  if (group >= evicted_by_group_.size()) evicted_by_group_.resize(size_t{group} + 1);
}

uint8_t BlockPool::forget_hashes(BlockId id, uint64_t key) {
  Block& block = blocks_[id];
  uint8_t flags = 0;
  if (is_indexed(block)) {
    flags = Forgotten::kHasHash;
    if (index_.erase(key, id)) flags |= Forgotten::kIsLast;
  }
  block.epoch = 0;
  --num_cached_;
  return flags;
}

void BlockPool::take_oldest(int64_t n, BlockId* out) {
  // Traverses the list first, so that the blocks and the index entries of their hashes can be
  // prefetched.
  for (int64_t i = 0; i < n; ++i) {
    out[i] = cached_free_.head();
    cached_free_.remove(links_.data(), out[i]);
    __builtin_prefetch(&blocks_[out[i]], 1);
  }
  auto keys =
      keys_ahead<kPrefetchBlocks>(index_, n, [&](int64_t i) { return key_of(blocks_[out[i]]); });
  for (int64_t i = 0; i < n; ++i) {
    ++evicted_by_group_[blocks_[out[i]].group];
    flags_[i] = forget_hashes(out[i], keys.next(i));
  }
}

void BlockPool::note_use() { peak_used_ = std::max(peak_used_, num_total() - num_free_); }

inline int64_t BlockPool::take_uncached(int64_t n, BlockId* out) {
  int64_t done = std::min<int64_t>(n, num_blocks_ - next_fresh_);
  std::iota(out, out + done, next_fresh_);
  next_fresh_ += static_cast<BlockId>(done);
  for (; done < n && uncached_free_.head() != kNullBlock; ++done) {
    out[done] = uncached_free_.head();
    uncached_free_.remove(links_.data(), out[done]);
    __builtin_prefetch(&blocks_[out[done]], 1);
  }
  return done;
}

bool BlockPool::allocate(int64_t n, BlockId* out) {
  if (n < 0) throw_invalid("n is ", n, ": expected 0 or more");
  if (n > num_free_) return false;
  const Soundness::Change change = this->change("allocate");
  reserve_flags(n);
  const int64_t num_uncached = take_uncached(n, out);
  const int64_t num_evicted = n - num_uncached;
  BlockId* const evicted = out + num_uncached;
  candidates_ || pins_ ? take_chosen(num_evicted, evicted) : take_oldest(num_evicted, evicted);
  num_evicted_ += num_evicted;
  for (int64_t i = 0; i < n; ++i) {
    Block& block = blocks_[out[i]];
    block.ref_count = 1;
    ++block.generation;
  }
  num_free_ -= n;
  note_use();
  if (num_evicted > 0) tell_forgotten(Forgotten::Why::kEvicted, {evicted, num_evicted});
  return true;
}

void BlockPool::retain(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = at(ids[i], "ids");
    if (block.ref_count == 0 && !is_cached(block)) {
      throw_invalid("ids holds block ", ids[i],
                    ", which is free and not cached: expected a held or cached block");
    }
  }
  const Soundness::Change change = this->change("retain");
  for (int64_t i = 0; i < n; ++i) {
    if (i + kPrefetchBlocks < n) __builtin_prefetch(&blocks_[ids[i + kPrefetchBlocks]], 1);
    Block& block = blocks_[ids[i]];
    if (block.ref_count++ > 0) continue;
    --num_free_;
    unlist(ids[i]);
    if (candidates_) candidates_->set_idle(ids[i], false);
  }
  note_use();
}

// Undoes the releases in reverse order. Each block is the tail of its list, so the lists are
// restored exactly.
void BlockPool::undo_release(const BlockId* ids, int64_t n) {
  while (n-- > 0) {
    if (blocks_[ids[n]].ref_count++ > 0) continue;
    list_of(blocks_[ids[n]]).remove(links_.data(), ids[n]);
    --num_free_;
  }
}

void BlockPool::release(const BlockId* ids, int64_t n) {
  check_sound();
  check_caller("release");
  const BlockId last_cached = cached_free_.tail(), last_uncached = uncached_free_.tail();
  for (int64_t i = 0; i < n; ++i) {
    const BlockId ahead = i + kPrefetchBlocks < n ? ids[i + kPrefetchBlocks] : kNullBlock;
    if (has(ahead)) __builtin_prefetch(&blocks_[ahead], 1);
    const BlockId id = ids[i];
    if (!has(id) || blocks_[id].ref_count == 0) {
      undo_release(ids, i);
      check_id(id, "ids");
      throw_invalid("ids holds block ", id, " more often than it is held: it was already released");
    }
    if (--blocks_[id].ref_count > 0) continue;
    list_of(blocks_[id]).push(links_.data(), id);
    ++num_free_;
  }
  if (is_plain_) return;
  const Soundness::Change change = this->change("release");
  tell_released(last_cached, last_uncached);
}

// Blocks that pass this check are marked, to detect repeated ids.
const char* BlockPool::obstacle_to_publish(BlockId id, uint8_t group) const {
  if (!has(id)) return "";
  const Block& block = blocks_[id];
  if (block.ref_count == 0) return ", which is free: expected a held one";
  if (is_indexed(block) || block.younger == kMarked) return ", which is already published";
  if (is_cached(block) && block.group != group) return ", which is published for another group";
  return nullptr;
}

void BlockPool::check_publish(const BlockId* ids, int64_t n, uint8_t group) {
  for (int64_t i = 0; i < n; ++i) {
    const char* const obstacle = obstacle_to_publish(ids[i], group);
    if (obstacle == nullptr) {
      blocks_[ids[i]].younger = kMarked;
      continue;
    }
    const BlockId id = ids[i];
    while (i-- > 0) blocks_[ids[i]].younger = kNullBlock;
    check_id(id, "ids");
    throw_invalid("ids holds block ", id, obstacle);
  }
}

// The first block of a chain has no parent, even if `content.parent` is the seed of its hash.
inline BlockPool::Cursor BlockPool::begin_of(const Content& content, uint8_t group) const {
  Cursor at{{key_of(*content.parent, group), kNullBlock},
            content.is_chain && !content.begins_chain,
            content.root ? short_tag_of(*content.root) : 0};
  if (candidates_ && at.has_parent) at.parent.oldest = index_.find(at.parent.key);
  return at;
}

inline bool BlockPool::publish_one(BlockId id, const Content& content, int64_t i, uint8_t group,
                                   uint64_t key, Cursor* at) {
  Block& block = blocks_[id];
  if (is_cached(block)) {
    lineage_[id].set_parent(at->parent.key);  // partial content is published without the parent
  } else {
    // Without a root, each block is a chain, and its own hash is the first one.
    set_cached(id, group, at->parent.key, content.root ? at->root : static_cast<uint32_t>(key));
  }
  block.hash = content.hash(i);
  variants_.note(id, content.variant(i), content.adapter);
  const BlockId oldest = index_.insert(key, id);
  if (candidates_) add_place(id, key, at->has_parent ? &at->parent : nullptr);
  at->parent = {key, oldest};
  at->has_parent = content.is_chain;
  return oldest == id;
}

void BlockPool::publish(const BlockId* ids, const Content& content, int64_t n, uint8_t group) {
  auto keys = keys_ahead<kPrefetchBlocks>(
      index_, n, [&](int64_t i) { return key_of(content.hash(i), group); });
  check_caller("publish");
  check_publish(ids, n, group);
  const Soundness::Change change = this->change("publish");
  if (n == 0) return;
  reserve_flags(n);
  uint8_t* const is_first = flags_.data();
  Cursor at = begin_of(content, group);
  for (int64_t i = 0; i < n; ++i) {
    is_first[i] = publish_one(ids[i], content, i, group, keys.next(i), &at);
  }
  if (listeners_.empty()) return;
  tell(&BlockListener::on_publish, Published{{ids, n}, group, is_first, &content});
  rethrow_listener_failure();
}

Copied BlockPool::copied(BlockId id, bool is_chain) const {
  const Block& block = blocks_[id];
  return {block.hash, block.group,      lineage_[id].parent(),   lineage_[id].root,
          is_chain,   variants_.of(id), variants_.adapter_of(id)};
}

void BlockPool::publish_copy(BlockId id, const Copied& copied) {
  check_caller("publish_copy");
  check_publish(&id, 1, copied.group);
  const Soundness::Change change = this->change("publish_copy");
  set_cached(id, copied.group, copied.parent, copied.root);
  blocks_[id].hash = copied.hash;
  variants_.note(id, copied.variant, copied.adapter);
  const uint64_t key = key_of(blocks_[id]);
  const uint8_t is_first = index_.insert(key, id) == id;
  if (candidates_) {
    const bool has_parent = copied.is_chain && copied.root != short_tag_of(copied.hash);
    const Candidates::Parent parent{copied.parent, index_.find(copied.parent)};
    add_place(id, key, has_parent ? &parent : nullptr);
  }
  tell(&BlockListener::on_publish,
       Published{{&id, 1}, copied.group, &is_first, /*content=*/nullptr, &copied});
  rethrow_listener_failure();
}

void BlockPool::publish_partial(BlockId id, const Hash& hash, const Hash& root, uint8_t group,
                                uint64_t variant) {
  const Block& block = at(id, "id");
  if (block.ref_count == 0) {
    throw_invalid("id holds block ", id, ", which is free: expected a held one");
  }
  if (is_cached(block) && block.group != group) {
    throw_invalid("id holds block ", id, ", which is published for another group");
  }
  const Soundness::Change change = this->change("publish_partial");
  bool is_new = false;
  if (!is_cached(block)) {
    set_cached(id, group, /*parent=*/0, short_tag_of(root));
    is_new = true;
  }
  partial_.add(id, hash, group, variant);
  const uint8_t is_first = 1;
  if (is_new) tell(&BlockListener::on_publish, Published{{&id, 1}, group, &is_first});
  rethrow_listener_failure();
}

int64_t BlockPool::lookup(const Hash* hashes, int64_t n, uint8_t group, bool prefix, BlockId* out,
                          int64_t stride) const {
  // Prefetches a hash's bucket first, then its block.
  auto keys = keys_ahead<2 * kPrefetchBlocks>(
      index_, n, [&](int64_t i) { return key_of(hashes[i * stride], group); });
  int64_t num_leading = -1;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = keys.next(i);
    if (i + kPrefetchBlocks < n) index_.prefetch_block(keys[i + kPrefetchBlocks]);
    const BlockId id = index_.find(key, hashes[i * stride], group);
    out[i] = id == kNullBlock ? -1 : id;
    if (id != kNullBlock || num_leading >= 0) continue;
    num_leading = i;
    if (prefix) {
      std::fill(out + i, out + n, -1);
      break;
    }
  }
  return num_leading < 0 ? n : num_leading;
}

void BlockPool::evict(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) check_id(ids[i], "ids");
  const Soundness::Change change = this->change("evict");
  reserve_flags(n);
  batch_.clear();
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = blocks_[ids[i]];
    if (!is_cached(block)) continue;
    if (block.ref_count == 0) {
      unlist(ids[i]);
      uncached_free_.push(links_.data(), ids[i]);
    }
    flags_[batch_.size()] = forget(ids[i], /*evicted=*/false);
    batch_.push_back(ids[i]);
  }
  tell_forgotten(Forgotten::Why::kRemoved, batch_);
}

void BlockPool::evict_group(uint8_t group) {
  std::vector<BlockId> ids;
  for (BlockId id = 1; id < next_fresh_; ++id) {
    if (is_cached(blocks_[id]) && blocks_[id].group == group) ids.push_back(id);
  }
  evict(ids.data(), static_cast<int64_t>(ids.size()));
}

bool BlockPool::reset() {
  check_sound();
  if (num_free_ != num_total()) return false;
  clear();
  return true;
}

void BlockPool::clear() {
  const Soundness::Change change = this->change("reset");
  batch_.clear();
  if (!listeners_.empty()) reserve_flags(num_cached_);
  for (BlockId id = 1; !listeners_.empty() && id < next_fresh_; ++id) {
    if (!is_cached(blocks_[id])) continue;
    flags_[batch_.size()] = is_indexed(blocks_[id]) ? Forgotten::kHasHash : 0;
    batch_.push_back(id);
  }
  if (num_cached_ > 0) index_.clear();
  if (!is_plain_) clear_places();
  uncached_free_.take_over(links_.data(), &cached_free_);
  num_cached_ = 0;
  if (++epoch_ == 0) {  // the epoch wrapped around, so no block may keep an old epoch
    for (BlockId id = 1; id < next_fresh_; ++id) blocks_[id].epoch = 0;
    epoch_ = 1;
  }
  partial_.clear();
  variants_.clear();
  tell_forgotten(Forgotten::Why::kReset, batch_);
}

void BlockPool::check_invariants() const {
  const std::vector<char> listed = check_lists();
  require(blocks_[kNullBlock].ref_count == 0 && !is_cached(blocks_[kNullBlock]), "null block used");
  int64_t num_cached = 0;
  for (BlockId id = 1; id < num_blocks_; ++id) {
    check_block(id, listed[id]);
    num_cached += is_cached(blocks_[id]);
  }
  require(num_cached == num_cached_, "num_cached is wrong");
  check_places();
}

std::vector<char> BlockPool::check_lists() const {
  std::vector<char> listed(static_cast<size_t>(num_blocks_), 0);
  int64_t num_listed = 0;
  for (const FreeList* list : {&uncached_free_, &cached_free_}) {
    BlockId before = kNullBlock;
    for (BlockId id = list->head(); id != kNullBlock; before = id, id = links_[id].next) {
      require(!listed[id], "a block is in a free list twice: ", id);
      listed[id] = 1;
      ++num_listed;
      require(links_[id].prev == before, "a free list is not linked backwards: ", id);
      require(blocks_[id].ref_count == 0, "a block in a free list is held: ", id);
      require(is_cached(blocks_[id]) == (list != &uncached_free_),
              "a block is in the wrong list: ", id);
      require(id < next_fresh_, "a fresh block is in a free list: ", id);
    }
  }
  require(num_free_ == num_listed + (num_blocks_ - next_fresh_), "num_free is wrong");
  return listed;
}

void BlockPool::check_block(BlockId id, bool is_listed) const {
  const Block& block = blocks_[id];
  require(block.ref_count >= 0, "a negative reference count: ", id);
  require(id < next_fresh_ || (block.ref_count == 0 && !is_cached(block)),
          "a fresh block in use: ", id);
  require(id >= next_fresh_ || is_listed == (block.ref_count == 0), "neither held nor free: ", id);
  if (!is_cached(block)) return;
  require(is_indexed(block) || partial_.has(id), "a cached block is under no hash: ", id);
  if (!is_indexed(block)) return;
  // The block must be reachable from the index, which finds the oldest block of a ring.
  const BlockId oldest = index_.find(block.hash, block.group);
  require(oldest != kNullBlock, "a cached block is not in the index: ", id);
  BlockId other = oldest;
  while (other != id && blocks_[other].younger != oldest) other = blocks_[other].younger;
  require(other == id, "a cached block is not in the ring of its hash: ", id);
}

}  // namespace kvcache
