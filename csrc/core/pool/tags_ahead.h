// SPDX-License-Identifier: Apache-2.0
// The tags of a batch of hashes, for searches in an index.
#pragma once

#include <cstdint>

#include "core/hash.h"
#include "core/pool/hash_index.h"

namespace kvcache {

struct HashOfGroup {
  const Hash& hash;
  uint8_t group;
};

// Computes each tag once, kAhead positions before it is needed, and prefetches its bucket.
// `hash_at(i)` returns the i-th of n hashes.
template <int64_t kAhead, class HashAt>
class TagsAhead {
 public:
  TagsAhead(const HashIndex* index, int64_t n, HashAt hash_at)
      : index_(index), n_(n), hash_at_(hash_at) {
    fold_from(0);
  }
  // Returns the i-th tag for the current key of the index. Earlier tags are not kept.
  uint32_t next(int64_t i) {
    if (index_->num_keys() != num_keys_) fold_from(i);
    const uint32_t tag = tags_[i % kAhead];
    fold(i + kAhead);
    return tag;
  }
  // Returns the i-th tag, which one of the next kAhead calls of `next` will return if the key does
  // not change.
  uint32_t operator[](int64_t i) const { return tags_[i % kAhead]; }

 private:
  void fold_from(int64_t first) {
    num_keys_ = index_->num_keys();
    for (int64_t i = first; i < first + kAhead; ++i) fold(i);
  }
  void fold(int64_t i) {
    if (i >= n_) return;
    const HashOfGroup at = hash_at_(i);
    const uint32_t tag = index_->tag_of(at.hash, at.group);
    index_->prefetch_bucket(tag);
    tags_[i % kAhead] = tag;
  }

  const HashIndex* index_;
  int64_t n_;
  HashAt hash_at_;
  int64_t num_keys_;
  uint32_t tags_[kAhead];
};

template <int64_t kAhead, class HashAt>
TagsAhead<kAhead, HashAt> tags_ahead(const HashIndex& index, int64_t n, HashAt hash_at) {
  return {&index, n, hash_at};
}

}  // namespace kvcache
