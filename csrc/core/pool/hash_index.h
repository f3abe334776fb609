// SPDX-License-Identifier: Apache-2.0
// Maps each hash to the blocks that contain its content.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/secret_key.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Maps (hash, group) to the blocks published under it, oldest first. The table consists of buckets
// of one cache line each, which are searched without a branch per entry. Entries contain 32 bits of
// the key, so that a search accesses a block only if it almost certainly matches. An entry refers
// to the oldest block of a ring of duplicates, so insertion and removal are O(1) for any number of
// duplicates.
class HashIndex {
 public:
  HashIndex(Block* blocks, int64_t num_blocks, const SecretKey& key = SecretKey::drawn());
  // Returns the tag of a hash, which is used in searches. Callers that process many hashes compute
  // each tag once. A tag is valid only for the current key, which an insertion may replace.
  uint32_t tag_of(const Hash& hash, uint8_t group) const {
    return static_cast<uint32_t>(key_.fold(hash, group) >> 32) | 1u;  // 0 marks an empty slot
  }
  BlockId find(uint32_t tag, const Hash& hash, uint8_t group) const {
    const Place place = place_of(tag, hash, group);
    return place.slot < 0 ? kNullBlock : buckets_[place.bucket].ids[place.slot];
  }
  BlockId find(const Hash& hash, uint8_t group) const {
    return find(tag_of(hash, group), hash, group);
  }
  // Inserts a block as the youngest of its ring. Its hash and group must be set and have this tag.
  // Returns whether the block is the first under its hash.
  bool insert(uint32_t tag, BlockId id);
  bool insert(BlockId id) { return insert(tag_of(id), id); }
  bool erase(uint32_t tag, BlockId id);  // returns whether it was the last block under its hash
  bool erase(BlockId id) { return erase(tag_of(id), id); }
  // Removes all entries in O(1): buckets of an earlier epoch count as empty, and the first
  // insertion into a bucket empties it.
  void clear() {
    longest_walk_ = 1;
    if (++epoch_ == 0) buckets_.zero();  // the epoch wrapped around
  }
  // Prefetches the data that `find` with this tag will read. The first function prefetches the
  // bucket. The second prefetches the block, after the bucket has arrived.
  void prefetch_bucket(uint32_t tag) const { __builtin_prefetch(&buckets_[home_of(tag)], 1); }
  void prefetch_block(uint32_t tag) const {
    const Bucket& bucket = buckets_[home_of(tag)];
    const unsigned slots = slots_with(bucket, tag);
    if (slots != 0) __builtin_prefetch(&blocks_[bucket.ids[__builtin_ctz(slots)]], 1);
  }
  size_t num_bytes() const { return buckets_.num_bytes(); }
  // The maximum number of buckets per search. With a secret key, a search of more than kLongestWalk
  // buckets practically never occurs. If it does, the index draws a new key and is rebuilt.
  int64_t longest_walk() const { return longest_walk_; }
  static constexpr int64_t kLongestWalk = 16;
  int64_t num_keys() const { return num_keys_; }  // number of keys drawn

 private:
  static constexpr int kSlots = 7;
  struct alignas(64) Bucket {
    uint32_t tags[kSlots];  // 0: the slot is empty
    // Number of entries stored after this bucket whose home is at or before it.
    uint32_t num_displaced;
    BlockId ids[kSlots];
    uint32_t epoch;  // epoch of the content
  };
  static_assert(sizeof(Bucket) == 64, "a search reads one cache line per bucket");
  struct Place {
    int64_t bucket;
    int slot;  // -1: not found
  };
  // Returns a bit mask. Bit i is set if slot i has this tag.
  static unsigned slots_with(const Bucket& bucket, uint32_t tag) {
#if defined(__SSE2__)
    // The tags and num_displaced fit in two registers.
    const auto* words = reinterpret_cast<const __m128i*>(&bucket);
    const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
    const auto equal = [&](const __m128i* four) {
      const __m128i lanes = _mm_cmpeq_epi32(_mm_load_si128(four), wanted);
      return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(lanes)));
    };
    return (equal(words) | equal(words + 1) << 4) & ((1u << kSlots) - 1);
#else
    unsigned slots = 0;
    for (int i = 0; i < kSlots; ++i) slots |= static_cast<unsigned>(bucket.tags[i] == tag) << i;
    return slots;
#endif
  }
  uint32_t tag_of(BlockId id) const { return tag_of(blocks_[id].hash, blocks_[id].group); }
  int64_t home_of(uint32_t tag) const {
    return static_cast<int64_t>((uint64_t{tag} * static_cast<uint64_t>(num_buckets_)) >> 32);
  }
  int64_t after(int64_t bucket) const { return bucket + 1 == num_buckets_ ? 0 : bucket + 1; }
  Place place_of(uint32_t tag, const Hash& hash, uint8_t group) const {
    // The search is bounded, because there may be no bucket without displaced entries. All entries
    // lie within this distance of their home bucket.
    int64_t b = home_of(tag);
    // If the home bucket belongs to this epoch, so do all buckets that can hold its entries.
    if (buckets_[b].epoch != epoch_) return {b, -1};
    for (int64_t left = longest_walk_; left > 0; --left, b = after(b)) {
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
  void add(uint32_t tag, BlockId id);
  void draw_new_key();

  Block* blocks_;
  SecretKey key_;
  int64_t num_buckets_;
  ZeroedArray<Bucket> buckets_;
  uint32_t epoch_ = 0;
  int64_t num_keys_ = 1;
  int64_t longest_walk_ = 1;
  int64_t most_walk_ = kLongestWalk;  // a longer search triggers a new key
};

}  // namespace kvcache
