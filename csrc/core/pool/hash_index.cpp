// SPDX-License-Identifier: Apache-2.0
#include "core/pool/hash_index.h"

#include <algorithm>
#include <exception>

namespace kvcache {

HashIndex::HashIndex(Block* blocks, int64_t num_blocks, const SecretKey& key)
    // If every block is cached, four of seven slots are used and 5 % of the buckets overflow.
    : blocks_(blocks),
      key_(key),
      num_buckets_((num_blocks + 3) / 4),
      buckets_(static_cast<size_t>(num_buckets_)) {}

void HashIndex::add(uint32_t tag, BlockId id) {
  // The table has more slots than the pool has blocks, so there is always an empty slot.
  int64_t walk = 1;
  for (int64_t b = home_of(tag);; b = after(b), ++walk) {
    Bucket& bucket = buckets_[b];
    if (bucket.epoch != epoch_) {
      bucket = Bucket{};
      bucket.epoch = epoch_;
    }
    const unsigned empty = slots_with(bucket, 0);
    if (empty != 0) {
      const int slot = __builtin_ctz(empty);
      bucket.tags[slot] = tag;
      bucket.ids[slot] = id;
      break;
    }
    ++bucket.num_displaced;
  }
  longest_walk_ = std::max(longest_walk_, walk);
}

void HashIndex::draw_new_key() {
  try {
    ZeroedArray<Bucket> before(static_cast<size_t>(num_buckets_));
    key_ = SecretKey::drawn();
    ++num_keys_;
    before.swap(buckets_);
    longest_walk_ = 1;
    for (int64_t b = 0; b < num_buckets_; ++b) {
      if (before[b].epoch != epoch_) continue;
      for (int slot = 0; slot < kSlots; ++slot) {
        if (before[b].tags[slot] == 0) continue;
        add(tag_of(before[b].ids[slot]), before[b].ids[slot]);
      }
    }
  } catch (const std::exception&) {
    // If memory or random bytes are unavailable, the index remains unchanged, which is correct but
    // slow.
  }
  // If the new key did not help, the next attempt is delayed, so that the total cost of attempts
  // stays low.
  most_walk_ = std::max(kLongestWalk, 2 * longest_walk_);
}

bool HashIndex::insert(uint32_t tag, BlockId id) {
  Block& block = blocks_[id];
  const Place place = place_of(tag, block.hash, block.group);
  if (place.slot < 0) {
    block.older = block.younger = id;
    add(tag, id);
    if (longest_walk_ > most_walk_) draw_new_key();
    return true;
  }
  // The ring is circular: the block "older" than the oldest is the youngest. `id` is inserted
  // between these two blocks.
  const BlockId oldest = buckets_[place.bucket].ids[place.slot];
  const BlockId youngest = blocks_[oldest].older;
  block.older = youngest;
  block.younger = oldest;
  blocks_[youngest].younger = id;
  blocks_[oldest].older = id;
  return false;
}

bool HashIndex::erase(uint32_t tag, BlockId id) {
  Block& block = blocks_[id];
  const bool alone = block.younger == id;
  if (!alone) {
    blocks_[block.older].younger = block.younger;
    blocks_[block.younger].older = block.older;
  }
  const BlockId next = block.younger;
  block.older = block.younger = kNullBlock;
  const int64_t home = home_of(tag);
  int64_t b = home;
  for (int64_t left = longest_walk_; left > 0; --left, b = after(b)) {
    Bucket& bucket = buckets_[b];
    for (unsigned slots = slots_with(bucket, tag); slots != 0; slots &= slots - 1) {
      const int slot = __builtin_ctz(slots);
      if (bucket.ids[slot] != id) continue;
      if (!alone) {
        bucket.ids[slot] = next;  // the next oldest block takes over the entry
        return false;
      }
      bucket.tags[slot] = 0;
      for (int64_t passed = home; passed != b; passed = after(passed)) {
        --buckets_[passed].num_displaced;
      }
      return true;
    }
    // The block is not the oldest of its ring, so it has no entry.
    if (bucket.num_displaced == 0) break;
  }
  return false;
}

}  // namespace kvcache
