#include "core/pool/hash_index.h"

namespace kvcache {

HashIndex::HashIndex(Block* blocks, int64_t num_blocks)
    // Four of seven slots taken when every block is cached: then 5 % of the buckets overflow.
    : blocks_(blocks),
      num_buckets_((num_blocks + 3) / 4),
      buckets_(static_cast<size_t>(num_buckets_)) {}

uint32_t HashIndex::tag_of(const Hash& hash, uint8_t group) {
  // Digests are uniform already; the multiplication also spreads hashes that a caller made up.
  const uint64_t word = (hash.word() ^ (uint64_t{group} << 48)) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint32_t>(word >> 32) | 1u;  // never that of an empty slot
}

HashIndex::Place HashIndex::place_of(uint32_t tag, const Hash& hash, uint8_t group) const {
  // Every walk is bounded: hashes that a caller made up can leave no bucket without displaced
  // entries, and a search would go round for ever.
  int64_t b = home_of(tag);
  for (int64_t left = num_buckets_; left > 0; --left, b = after(b)) {
    const Bucket& bucket = buckets_[b];
    for (unsigned slots = slots_with(bucket, tag); slots != 0; slots &= slots - 1) {
      const int slot = __builtin_ctz(slots);
      const Block& block = blocks_[bucket.ids[slot]];
      if (block.group == group && block.hash == hash) return {b, slot};
    }
    if (bucket.num_displaced == 0) break;
  }
  return {b, -1};
}

BlockId HashIndex::find(const Hash& hash, uint8_t group) const {
  const Place place = place_of(tag_of(hash, group), hash, group);
  return place.slot < 0 ? kNullBlock : buckets_[place.bucket].ids[place.slot];
}

void HashIndex::prefetch_bucket(const Hash& hash, uint8_t group) const {
  __builtin_prefetch(&buckets_[home_of(tag_of(hash, group))], 1);
}

void HashIndex::prefetch_block(const Hash& hash, uint8_t group) const {
  const uint32_t tag = tag_of(hash, group);
  const Bucket& bucket = buckets_[home_of(tag)];
  const unsigned slots = slots_with(bucket, tag);
  if (slots != 0) __builtin_prefetch(&blocks_[bucket.ids[__builtin_ctz(slots)]], 1);
}

void HashIndex::add(uint32_t tag, BlockId id) {
  // There is an empty slot: the table has more of them than there are blocks.
  for (int64_t b = home_of(tag);; b = after(b)) {
    Bucket& bucket = buckets_[b];
    const unsigned empty = slots_with(bucket, 0);
    if (empty != 0) {
      const int slot = __builtin_ctz(empty);
      bucket.tags[slot] = tag;
      bucket.ids[slot] = id;
      return;
    }
    ++bucket.num_displaced;
  }
}

bool HashIndex::insert(BlockId id) {
  Block& block = blocks_[id];
  const uint32_t tag = tag_of(block.hash, block.group);
  const Place place = place_of(tag, block.hash, block.group);
  if (place.slot < 0) {
    block.older = block.younger = id;
    add(tag, id);
    return true;
  }
  // The ring is circular: what is "older" than the oldest is the youngest, where `id` goes in.
  const BlockId oldest = buckets_[place.bucket].ids[place.slot];
  const BlockId youngest = blocks_[oldest].older;
  block.older = youngest;
  block.younger = oldest;
  blocks_[youngest].younger = id;
  blocks_[oldest].older = id;
  return false;
}

bool HashIndex::erase(BlockId id) {
  Block& block = blocks_[id];
  const uint32_t tag = tag_of(block.hash, block.group);
  const bool alone = block.younger == id;
  if (!alone) {
    blocks_[block.older].younger = block.younger;
    blocks_[block.younger].older = block.older;
  }
  const BlockId next = block.younger;
  block.older = block.younger = kNullBlock;
  const int64_t home = home_of(tag);
  int64_t b = home;
  for (int64_t left = num_buckets_; left > 0; --left, b = after(b)) {
    Bucket& bucket = buckets_[b];
    for (unsigned slots = slots_with(bucket, tag); slots != 0; slots &= slots - 1) {
      const int slot = __builtin_ctz(slots);
      if (bucket.ids[slot] != id) continue;
      if (!alone) {
        bucket.ids[slot] = next;  // the next oldest takes the entry over
        return false;
      }
      bucket.tags[slot] = 0;
      for (int64_t passed = home; passed != b; passed = after(passed)) {
        --buckets_[passed].num_displaced;
      }
      return true;
    }
    if (bucket.num_displaced == 0) break;  // not the oldest of its ring: it has no entry
  }
  return false;
}

}  // namespace kvcache
