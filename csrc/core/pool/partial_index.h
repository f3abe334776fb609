// SPDX-License-Identifier: Apache-2.0
// Maps hashes of prefixes that end inside a block to partially filled blocks.
//
// Only managers whose hash blocks are smaller than their allocation blocks have partial blocks.
// They copy the block when it is hit. The blocks under one hash form a list, oldest first, and so
// do the entries of a block. Every operation is O(1) per entry, for any number of blocks with equal
// prefixes.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/pool/variants.h"
#include "core/secret_key.h"

namespace kvcache {

class PartialIndex {
 public:
  // Returns the oldest block with the content of this hash, or the null block if there is none or
  // its variant differs.
  BlockId find(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    if (by_hash_.empty()) return kNullBlock;
    const auto found = by_hash_.find({hash, group});
    if (found == by_hash_.end()) return kNullBlock;
    const Part& part = parts_[found->second.first];
    return is_variant(part.variant, variant) ? part.block : kNullBlock;
  }
  void add(BlockId id, const Hash& hash, uint8_t group, uint64_t variant = 0);
  void forget(BlockId id);  // removes all entries of the block
  void clear();
  bool empty() const { return of_block_.empty(); }
  bool has(BlockId id) const { return of_block_.count(id) != 0; }
  std::vector<Hash> of(BlockId id) const;

 private:
  static constexpr int32_t kNone = -1;
  struct Key {
    Hash hash;
    uint8_t group;
    bool operator==(const Key& other) const { return group == other.group && hash == other.hash; }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return SecretKey::of_process().fold(key.hash, key.group);
    }
  };
  struct Part {
    Key key;
    BlockId block;
    int32_t older, younger;  // neighbors under the same hash
    int32_t next_of_block;   // the block's next shorter part, or the next unused entry
    uint64_t variant;
  };
  struct Ends {
    int32_t first, last;  // oldest and youngest entry
  };

  std::vector<Part> parts_;
  int32_t unused_ = kNone;
  std::unordered_map<Key, Ends, KeyHash> by_hash_;
  std::unordered_map<BlockId, int32_t> of_block_;  // the block's latest part
};

}  // namespace kvcache
