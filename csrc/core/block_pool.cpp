#include "core/block_pool.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/limits.h"

namespace kvcache {

namespace {

// How far ahead a batch loop touches the cache line that it will need: enough to hide a miss to
// memory behind the work on the blocks before it.
constexpr int64_t kPrefetchBlocks = 8;

std::string named(const char* what, BlockId id) {
  return std::string(what) + " holds block " + std::to_string(id);
}

}  // namespace

void FreeList::push(Link* links, BlockId id) {
  links[id] = {tail_, kNullBlock};
  (tail_ == kNullBlock ? head_ : links[tail_].next) = id;
  tail_ = id;
}

void FreeList::remove(Link* links, BlockId id) {
  const Link link = links[id];
  (link.prev == kNullBlock ? head_ : links[link.prev].next) = link.next;
  (link.next == kNullBlock ? tail_ : links[link.next].prev) = link.prev;
}

BlockPool::BlockPool(int64_t num_blocks)
    : num_blocks_(checked_size("num_blocks", num_blocks, 2, " (the null block is counted)")),
      blocks_(static_cast<size_t>(num_blocks)),
      links_(static_cast<size_t>(num_blocks)),
      index_(blocks_.data(), num_blocks),
      num_free_(num_blocks - 1) {}

size_t BlockPool::num_bytes() const {
  return sizeof(*this) + blocks_.num_bytes() + links_.num_bytes() + index_.num_bytes();
}

const Block& BlockPool::at(BlockId id, const char* what) const {
  if (id <= kNullBlock || id >= num_blocks_) {
    throw std::invalid_argument(named(what, id) + ": expected 1 to " +
                                std::to_string(num_blocks_ - 1));
  }
  return blocks_[id];
}

void BlockPool::forget(BlockId id) {
  index_.erase(id);
  blocks_[id].cached = false;
  --num_cached_;
}

void BlockPool::take_evicted(int64_t n, BlockId* out) {
  // The list is walked first: then the blocks, and the index entries that their hashes lead to, are
  // known far enough ahead to be loaded before they are needed.
  for (int64_t i = 0; i < n; ++i) {
    out[i] = cached_free_.head();
    cached_free_.remove(links_.data(), out[i]);
    __builtin_prefetch(&blocks_[out[i]], 1);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kPrefetchBlocks < n) {
      const Block& ahead = blocks_[out[i + kPrefetchBlocks]];
      index_.prefetch_bucket(ahead.hash, ahead.group);
    }
    const Block& block = blocks_[out[i]];
    if (record_evictions_) evicted_.push_back({block.hash, block.group});
    forget(out[i]);
  }
  num_evicted_ += n;
}

void BlockPool::note_use() { peak_used_ = std::max(peak_used_, num_total() - num_free_); }

bool BlockPool::allocate(int64_t n, BlockId* out) {
  if (n < 0) throw std::invalid_argument("n is " + std::to_string(n) + ": expected 0 or more");
  if (n > num_free_) return false;
  int64_t done = std::min<int64_t>(n, num_blocks_ - next_fresh_);
  std::iota(out, out + done, next_fresh_);
  next_fresh_ += static_cast<BlockId>(done);
  for (; done < n && uncached_free_.head() != kNullBlock; ++done) {
    out[done] = uncached_free_.head();
    uncached_free_.remove(links_.data(), out[done]);
  }
  take_evicted(n - done, out + done);
  for (int64_t i = 0; i < n; ++i) blocks_[out[i]].ref_count = 1;
  num_free_ -= n;
  note_use();
  return true;
}

void BlockPool::retain(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = at(ids[i], "ids");
    if (block.ref_count == 0 && !block.cached) {
      throw std::invalid_argument(
          named("ids", ids[i]) + ", which is free and not cached: expected a held or cached block");
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kPrefetchBlocks < n) __builtin_prefetch(&blocks_[ids[i + kPrefetchBlocks]], 1);
    Block& block = blocks_[ids[i]];
    if (block.ref_count++ == 0) {
      cached_free_.remove(links_.data(), ids[i]);
      --num_free_;
    }
  }
  note_use();
}

void BlockPool::release(const BlockId* ids, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const BlockId ahead = i + kPrefetchBlocks < n ? ids[i + kPrefetchBlocks] : kNullBlock;
    if (ahead > kNullBlock && ahead < num_blocks_) __builtin_prefetch(&blocks_[ahead], 1);
    const BlockId id = ids[i];
    if (id > kNullBlock && id < num_blocks_ && blocks_[id].ref_count > 0) {
      if (--blocks_[id].ref_count == 0) {
        list_of(blocks_[id]).push(links_.data(), id);
        ++num_free_;
      }
      continue;
    }
    // Backwards, each push is the tail that is removed: the lists come back exactly as they were.
    for (int64_t j = i; j-- > 0;) {
      if (blocks_[ids[j]].ref_count++ > 0) continue;
      list_of(blocks_[ids[j]]).remove(links_.data(), ids[j]);
      --num_free_;
    }
    at(id, "ids");  // throws where the id is not of this pool
    throw std::invalid_argument(named("ids", id) +
                                " more often than it is held: it was released already");
  }
}

void BlockPool::publish(const BlockId* ids, const Hash* hashes, int64_t n, uint16_t group) {
  int64_t done = 0;
  try {
    for (; done < n; ++done) {
      if (done + kPrefetchBlocks < n) index_.prefetch_bucket(hashes[done + kPrefetchBlocks], group);
      Block& block = at(ids[done], "ids");
      if (block.ref_count == 0) {
        throw std::invalid_argument(named("ids", ids[done]) +
                                    ", which is free: expected a held one");
      }
      if (block.cached) {
        throw std::invalid_argument(named("ids", ids[done]) + ", which is already published");
      }
      block.hash = hashes[done];
      block.group = group;
      block.cached = true;
      index_.insert(ids[done]);
      ++num_cached_;
    }
  } catch (...) {
    while (done-- > 0) forget(ids[done]);
    throw;
  }
}

int64_t BlockPool::lookup(const Hash* hashes, int64_t n, uint16_t group, bool prefix,
                          BlockId* out) const {
  int64_t num_leading = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (i + 2 * kPrefetchBlocks < n) index_.prefetch_bucket(hashes[i + 2 * kPrefetchBlocks], group);
    if (i + kPrefetchBlocks < n) index_.prefetch_block(hashes[i + kPrefetchBlocks], group);
    const BlockId id = index_.find(hashes[i], group);
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
  for (int64_t i = 0; i < n; ++i) at(ids[i], "ids");
  for (int64_t i = 0; i < n; ++i) {
    Block& block = blocks_[ids[i]];
    if (!block.cached) continue;
    if (block.ref_count == 0) {
      cached_free_.remove(links_.data(), ids[i]);
      uncached_free_.push(links_.data(), ids[i]);
    }
    if (record_evictions_) evicted_.push_back({block.hash, block.group});
    forget(ids[i]);
  }
}

bool BlockPool::reset() {
  if (num_free_ != num_total()) return false;
  for (BlockId id = cached_free_.head(); id != kNullBlock; id = cached_free_.head()) {
    cached_free_.remove(links_.data(), id);
    forget(id);
    uncached_free_.push(links_.data(), id);
  }
  return true;
}

int64_t BlockPool::count_free(const BlockId* ids, int64_t n) const {
  int64_t num_free = 0;
  for (int64_t i = 0; i < n; ++i) num_free += blocks_[ids[i]].ref_count == 0;
  return num_free;
}

void BlockPool::check_invariants() const {
  const auto require = [](bool ok, const char* what, int64_t id) {
    if (!ok) throw std::logic_error(std::string(what) + " (block " + std::to_string(id) + ")");
  };
  std::vector<char> listed(static_cast<size_t>(num_blocks_), 0);
  int64_t num_listed = 0;
  for (const FreeList* list : {&uncached_free_, &cached_free_}) {
    BlockId before = kNullBlock;
    for (BlockId id = list->head(); id != kNullBlock; before = id, id = links_[id].next) {
      require(!listed[id], "a block is in a free list twice", id);
      listed[id] = 1;
      ++num_listed;
      require(links_[id].prev == before, "a free list is not linked backwards", id);
      require(blocks_[id].ref_count == 0, "a block in a free list is held", id);
      require(blocks_[id].cached == (list == &cached_free_), "a block is in the wrong list", id);
      require(id < next_fresh_, "a fresh block is in a free list", id);
    }
  }
  require(num_free_ == num_listed + (num_blocks_ - next_fresh_), "num_free is wrong", 0);
  require(blocks_[kNullBlock].ref_count == 0 && !blocks_[kNullBlock].cached, "null block used", 0);
  int64_t num_cached = 0;
  for (BlockId id = 1; id < num_blocks_; ++id) {
    const Block& block = blocks_[id];
    require(block.ref_count >= 0, "a negative reference count", id);
    require(id < next_fresh_ || (block.ref_count == 0 && !block.cached), "a fresh block in use",
            id);
    require(id >= next_fresh_ || listed[id] == (block.ref_count == 0), "neither held nor free", id);
    if (!block.cached) continue;
    ++num_cached;
    // Reached from the index: the oldest of its ring is what a lookup finds.
    const BlockId oldest = index_.find(block.hash, block.group);
    require(oldest != kNullBlock, "a cached block is not in the index", id);
    BlockId other = oldest;
    while (other != id && blocks_[other].younger != oldest) other = blocks_[other].younger;
    require(other == id, "a cached block is not in the ring of its hash", id);
  }
  require(num_cached == num_cached_, "num_cached is wrong", 0);
}

}  // namespace kvcache
