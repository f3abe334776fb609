// What blocks hold in part: hashes of prefixes that end inside a block.
//
// Only managers whose hash blocks are finer than their allocation blocks have any: there, a hit
// inside a block is copied.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"

namespace kvcache {

class PartIndex {
 public:
  // The oldest block that holds what this hash stands for, or the null block.
  BlockId find(const Hash& hash, uint16_t group) const {
    if (blocks_.empty()) return kNullBlock;
    const auto found = blocks_.find({hash, group});
    return found == blocks_.end() ? kNullBlock : found->second.front();
  }
  void add(BlockId id, const Hash& hash, uint16_t group);
  void forget(BlockId id);  // all its parts
  void clear();
  bool empty() const { return parts_.empty(); }
  bool has(BlockId id) const { return parts_.count(id) != 0; }

 private:
  struct Key {
    Hash hash;
    uint16_t group;
    bool operator==(const Key& other) const { return group == other.group && hash == other.hash; }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return (HashOf()(key.hash) ^ key.group) * 0x9E3779B97F4A7C15ull;
    }
  };
  std::unordered_map<Key, std::vector<BlockId>, KeyHash> blocks_;  // oldest first
  std::unordered_map<BlockId, std::vector<Key>> parts_;
};

}  // namespace kvcache
