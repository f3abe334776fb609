// SPDX-License-Identifier: Apache-2.0
// The chains of cached blocks. A block should not be evicted before the cached blocks that follow
// it in a chain, because lookups would no longer find those blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/hash_index.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Counts the cached children of each (hash, group). The count is stored with the oldest block under
// the hash, which the index finds. If there is no such block, because a parent was evicted before
// its children or published after them, the count is stored in a map. Both are rare.
//
// Parents are identified by keys (`key_of`). If two hashes had equal keys, a block might be evicted
// earlier or later than necessary.
class CacheTree {
 public:
  CacheTree(const HashIndex* index, const Block* blocks, int64_t num_blocks)
      : index_(index), blocks_(blocks), places_(static_cast<size_t>(num_blocks)) {}

  struct Parent {
    uint64_t key;
    BlockId oldest;  // the oldest block with this key, or the null block if there is none
  };

  // Whether lookups could still find all other cached blocks without this block, because it has no
  // cached child or because another block has the same hash.
  bool is_leaf(BlockId id) const { return places_[id].num_children == 0 || !is_alone(id); }
  // Each block has one mark bit for the caller's own use. Adding the block resets the bit.
  bool is_marked(BlockId id) const { return places_[id].is_marked != 0; }
  void mark(BlockId id, bool is_marked) { places_[id].is_marked = is_marked; }
  // Adds a block that was just inserted into the index with this key, as a child of this parent
  // (null, or the block itself: it has no parent). Appends other blocks that have become leaves, or
  // are no longer leaves, to `changed`.
  void add(BlockId id, uint64_t key, const Parent* parent, std::vector<BlockId>* changed);
  // Removes a block before it is erased from the index. Blocks that are not in the index are
  // ignored. `parent`: the key of its parent, if it has one. Appends to `changed` like
  // `add`.
  void remove(BlockId id, uint64_t parent, std::vector<BlockId>* changed);
  void clear();
  size_t num_bytes() const;
  // Throws std::logic_error unless all counts agree with these blocks, which must be all blocks in
  // the index. `parent_of` returns the key of a block's parent.
  void check_invariants(const std::vector<BlockId>& indexed,
                        const std::function<uint64_t(BlockId)>& parent_of) const;

 private:
  struct Place {
    uint32_t num_children : 30;  // of its hash; 0 unless the block is the oldest under the hash
    uint32_t has_parent : 1;
    uint32_t is_marked : 1;
  };

  bool is_alone(BlockId id) const { return blocks_[id].younger == id; }

  const HashIndex* index_;
  const Block* blocks_;
  ZeroedArray<Place> places_;
  // The number of children of each hash without a block, by key.
  std::unordered_map<uint64_t, uint32_t> orphans_;
};

}  // namespace kvcache
