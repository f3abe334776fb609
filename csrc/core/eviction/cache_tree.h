// Which cached block follows which: a block whose successor in a chain is cached too should not go
// before it, because nothing would find the successor any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A key of 64 bits: equal by accident for one pair in 2**64.
inline uint64_t wide_key(const Hash& hash, uint8_t group) {
  return HashOf()(hash) ^ (uint64_t{group} * 0x9E3779B97F4A7C15ull);
}

// Per group and tag of a hash: the blocks under it, and how many cached blocks have it as their
// parent. Where two tags are equal by accident, a block is taken for no leaf, and waits longer, or
// for one of two under a hash.
class CacheTree {
 public:
  explicit CacheTree(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)) {}

  // Whether nothing cached is found through this block alone: it has no cached child, or is not the
  // only one under its hash.
  bool is_leaf(BlockId id) const {
    const Node* own = places_[id].own;
    return own == nullptr || own->num_children == 0 || places_[own->first].next != kNullBlock;
  }
  // The block is cached under a hash with this tag, behind `parent` (null: behind nothing). Adds
  // the other blocks that may be leaves now, or no longer, to `changed`.
  void add(BlockId id, uint32_t tag, const uint32_t* parent, uint8_t group,
           std::vector<BlockId>* changed);
  // The block is not cached any more; it need not have been added.
  void remove(BlockId id, std::vector<BlockId>* changed);
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
  void append_blocks(const Node& node, std::vector<BlockId>* out) const;

  std::unordered_map<uint64_t, Node> nodes_;
  ZeroedArray<Place> places_;
};

}  // namespace kvcache
