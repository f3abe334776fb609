// The order of cached blocks in their chains. A block should not be evicted before its cached
// successors, because nothing would find them any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/secret_key.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A key of 64 bits; different hashes collide with a probability of 2**-64.
inline uint64_t wide_key(const Hash& hash, uint8_t group) {
  return SecretKey::of_process().fold(hash, group);
}

// Per group and tag of a hash: the blocks with that hash, and how many cached blocks have it as
// their parent. Where two tags collide, a block may wrongly count as having children, and is
// evicted later, or as one of two blocks with the same hash.
class CacheTree {
 public:
  explicit CacheTree(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)) {}

  // Whether no cached block is found only through this one: it has no cached child, or another
  // block has the same hash.
  bool is_leaf(BlockId id) const {
    const Node* own = places_[id].own;
    return own == nullptr || own->num_children == 0 || places_[own->first].next != kNullBlock;
  }
  // The block is now cached with a hash of this tag, after `parent` (null: first of a chain). Adds
  // other blocks that have become leaves, or no longer are, to `changed`.
  void add(BlockId id, uint32_t tag, const uint32_t* parent, uint8_t group,
           std::vector<BlockId>* changed);
  // The block is not cached any more; it need not have been added.
  void remove(BlockId id, std::vector<BlockId>* changed);
  void clear();
  size_t num_bytes() const;
  // Throws std::logic_error unless exactly `num_added` blocks are present and counted correctly.
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
