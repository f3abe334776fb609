// SPDX-License-Identifier: Apache-2.0
#include "core/pool/hash_index.h"

namespace kvcache {

HashIndex::HashIndex(Block* blocks, int64_t num_blocks)
    // If every block is cached, four of seven slots are used and 5 % of the buckets overflow.
    : blocks_(blocks),
      num_buckets_((num_blocks + 3) / 4),
      buckets_(static_cast<size_t>(num_buckets_)) {}

void HashIndex::add(uint64_t key, BlockId id) {
  // The table has more slots than the pool has blocks, so there is always an empty slot.
  for (int64_t b = home_of(key);; b = after(b)) {
    Bucket& bucket = buckets_[b];
    if (bucket.epoch != epoch_) {
      bucket = Bucket{};
      bucket.epoch = epoch_;
    }
    const unsigned empty = slots_with(bucket, 0);
    if (empty != 0) {
      const int slot = __builtin_ctz(empty);
      bucket.tags[slot] = tag_in_bucket(key);
      bucket.ids[slot] = id;
      return;
    }
    ++bucket.num_displaced;
  }
}

BlockId HashIndex::insert(uint64_t key, BlockId id) {
  Block& block = blocks_[id];
  const BlockId oldest = find(key, block.hash, block.group);
  if (oldest == kNullBlock) {
    block.older = block.younger = id;
    add(key, id);
    return id;
  }
  // The ring is circular: the block "older" than the oldest is the youngest. `id` is inserted
  // between these two blocks.
  const BlockId youngest = blocks_[oldest].older;
  block.older = youngest;
  block.younger = oldest;
  blocks_[youngest].younger = id;
  blocks_[oldest].older = id;
  return oldest;
}

bool HashIndex::erase(uint64_t key, BlockId id) {
  Block& block = blocks_[id];
  const BlockId next = block.younger;
  const bool alone = next == id;
  blocks_[block.older].younger = next;
  blocks_[next].older = block.older;
  block.older = block.younger = kNullBlock;
  const Place place = search(key, [&](BlockId other) { return other == id; });
  if (place.slot < 0) return false;  // only the oldest block of a ring has an entry
  Bucket& bucket = buckets_[place.bucket];
  if (!alone) {
    bucket.ids[place.slot] = next;  // the next oldest block takes over the entry
    return false;
  }
  bucket.tags[place.slot] = 0;
  for (int64_t passed = home_of(key); passed != place.bucket; passed = after(passed)) {
    --buckets_[passed].num_displaced;
  }
  return true;
}

}  // namespace kvcache
