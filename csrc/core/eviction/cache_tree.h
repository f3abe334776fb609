// Which cached block follows which: a block whose successor in a chain is cached too should not go
// before it, because nothing would find the successor any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A key of 64 bits: equal by accident for one pair in 2**64.
inline uint64_t wide_key(const Hash& hash, uint8_t group) {
  return HashOf()(hash) ^ (uint64_t{group} * 0x9E3779B97F4A7C15ull);
}

// Per group and tag of a hash: the blocks under it, and how many cached blocks have it as their
// parent. A child is a child of every block under its parent's hash. Where two tags are equal by
// accident, a block is taken for no leaf, and waits longer.
class CacheTree {
 public:
  explicit CacheTree(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)) {}

  bool is_leaf(BlockId id) const {
    return places_[id].own == nullptr || places_[id].own->num_children == 0;
  }
  // The block is cached under a hash with this tag, behind `parent` (null: behind nothing). Answers
  // the first of the blocks that are no leaves any more.
  BlockId add(BlockId id, uint32_t tag, const uint32_t* parent, uint8_t group);
  // The block is not cached any more; it need not have been added. Answers the first of the blocks
  // that are leaves now.
  BlockId remove(BlockId id);
  // The next block under the same hash, or the null block.
  BlockId next(BlockId id) const { return places_[id].next; }
  void clear();
  size_t num_bytes() const;
  // Throws std::logic_error unless exactly `num_added` blocks are in, and counted where they
  // belong.
  void check_invariants(int64_t num_blocks, int64_t num_added) const;

 private:
  struct Node {
    uint64_t key;
    int32_t num_children;
    BlockId first;
  };
  struct Place {
    Node *own, *parent;  // stay where they are: the map never moves its values
    BlockId next, prev;
  };
  Node* node_at(uint64_t key);
  void drop_if_unused(Node* node);

  std::unordered_map<uint64_t, Node> nodes_;
  ZeroedArray<Place> places_;
};

}  // namespace kvcache
