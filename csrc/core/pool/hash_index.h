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
#include "core/zeroed_array.h"

namespace kvcache {

// Maps (hash, group) to the blocks published under it, oldest first. The table consists of buckets
// of one cache line each, which are searched without a branch per entry. Entries contain 32 bits of
// the key (`key_of`), so that a search accesses a block only if it almost certainly matches. An
// entry refers to the oldest block of a ring of duplicates, so insertion and removal are O(1) for
// any number of duplicates.
class HashIndex {
 public:
  HashIndex(Block* blocks, int64_t num_blocks);

  // Returns the oldest block under this hash, or the null block if there is none. Callers that
  // process many hashes compute each key once.
  BlockId find(uint64_t key, const Hash& hash, uint8_t group) const {
    return id_at(search(key, [&](BlockId id) {
      const Block& block = blocks_[id];
      return block.group == group && block.hash == hash;
    }));
  }
  BlockId find(const Hash& hash, uint8_t group) const {
    return find(key_of(hash, group), hash, group);
  }
  // The same, if only the key is known. Two hashes practically never have equal keys.
  BlockId find(uint64_t key) const {
    return id_at(search(key, [&](BlockId id) { return key_of(blocks_[id]) == key; }));
  }
  // Inserts a block as the youngest of its ring. Its hash and group must be set and have this key.
  // Returns the oldest block under its hash.
  BlockId insert(uint64_t key, BlockId id);
  bool erase(uint64_t key, BlockId id);  // returns whether it was the last block under its hash
  // Removes all entries in O(1): buckets of an earlier epoch count as empty, and the first
  // insertion into a bucket empties it.
  void clear() {
    if (++epoch_ == 0) buckets_.zero();  // the epoch wrapped around
  }
  // Prefetches the data that `find` with this key will read. The first function prefetches the
  // bucket. The second prefetches the block, after the bucket has arrived.
  void prefetch_bucket(uint64_t key) const { __builtin_prefetch(&buckets_[home_of(key)], 1); }
  void prefetch_block(uint64_t key) const {
    const Bucket& bucket = buckets_[home_of(key)];
    const unsigned slots = slots_with(bucket, tag_in_bucket(key));
    if (slots != 0) __builtin_prefetch(&blocks_[bucket.ids[__builtin_ctz(slots)]], 1);
  }
  size_t num_bytes() const { return buckets_.num_bytes(); }

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

  static uint32_t tag_in_bucket(uint64_t key) {
    return static_cast<uint32_t>(key >> 32) | 1u;  // 0 marks an empty slot
  }
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
  int64_t home_of(uint64_t key) const {
    return static_cast<int64_t>(((key >> 32) * static_cast<uint64_t>(num_buckets_)) >> 32);
  }
  int64_t after(int64_t bucket) const { return bucket + 1 == num_buckets_ ? 0 : bucket + 1; }
  BlockId id_at(const Place& place) const {
    return place.slot < 0 ? kNullBlock : buckets_[place.bucket].ids[place.slot];
  }
  // Finds the entry of this key whose block matches.
  template <class Matches>
  Place search(uint64_t key, const Matches& matches) const {
    const uint32_t tag = tag_in_bucket(key);
    int64_t b = home_of(key);
    // `add` empties each bucket of an earlier epoch on the way from the home of an entry to its
    // place. A home of an earlier epoch therefore has no entries, and the other buckets that the
    // search reads belong to this epoch.
    if (buckets_[b].epoch != epoch_) return {b, -1};
    // The search is bounded, because entries may be displaced past every bucket.
    for (int64_t left = num_buckets_; left > 0; --left, b = after(b)) {
      const Bucket& bucket = buckets_[b];
      for (unsigned slots = slots_with(bucket, tag); slots != 0; slots &= slots - 1) {
        const int slot = __builtin_ctz(slots);
        if (matches(bucket.ids[slot])) return {b, slot};
      }
      const bool is_last = bucket.num_displaced == 0;  // no entry is stored further from its home
      if (is_last) break;
    }
    return {b, -1};
  }
  void add(uint64_t key, BlockId id);

  Block* blocks_;
  int64_t num_buckets_;
  ZeroedArray<Bucket> buckets_;
  uint32_t epoch_ = 0;
};

// The keys of a batch of hashes. Computes each key once, kAhead positions before it is needed, and
// prefetches its bucket. `key_at(i)` returns the i-th of n keys.
template <int64_t kAhead, class KeyAt>
class KeysAhead {
 public:
  KeysAhead(const HashIndex& index, int64_t n, const KeyAt& key_at)
      : index_(index), n_(n), key_at_(key_at) {
    for (int64_t i = 0; i < kAhead; ++i) fetch(i);
  }
  // Must be called for each position, in order. Earlier keys are not kept.
  uint64_t next(int64_t i) {
    const uint64_t key = keys_[i % kAhead];
    fetch(i + kAhead);
    return key;
  }
  // Returns the i-th key, which one of the next kAhead calls of `next` will return.
  uint64_t operator[](int64_t i) const { return keys_[i % kAhead]; }

 private:
  void fetch(int64_t i) {
    if (i >= n_) return;
    keys_[i % kAhead] = key_at_(i);
    index_.prefetch_bucket(keys_[i % kAhead]);
  }

  const HashIndex& index_;
  int64_t n_;
  KeyAt key_at_;
  uint64_t keys_[kAhead];
};

template <int64_t kAhead, class KeyAt>
KeysAhead<kAhead, KeyAt> keys_ahead(const HashIndex& index, int64_t n, const KeyAt& key_at) {
  return {index, n, key_at};
}

}  // namespace kvcache
