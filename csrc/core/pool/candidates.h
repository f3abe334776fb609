// SPDX-License-Identifier: Apache-2.0
// The blocks from which an order chooses its victim: idle blocks without cached children.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/eviction_order.h"
#include "core/pool/hash_index.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A block should not be evicted before the cached blocks that follow it in a chain, because lookups
// would no longer find those blocks. Therefore, the cached children of each (hash, group) are
// counted. The count is stored with the oldest block under the hash, which the index finds. If
// there is no such block, because a parent was evicted before its children or published after them,
// the count is stored in a map. Both are rare.
//
// Parents are identified by keys (`key_of`). If two hashes had equal keys, a block might be evicted
// earlier or later than necessary.
class Candidates {
 public:
  Candidates(std::unique_ptr<EvictionOrder> order, const HashIndex* index, const Block* blocks,
             int64_t num_blocks)
      : order_(std::move(order)),
        index_(index),
        blocks_(blocks),
        places_(static_cast<size_t>(num_blocks)) {}

  struct Parent {
    uint64_t key;
    BlockId oldest;  // the oldest block with this key, or the null block if there is none
  };

  EvictionOrder& order() const { return *order_; }
  bool has(BlockId id) const { return places_[id].is_candidate != 0; }
  // Whether lookups could still find all other cached blocks without this block, because it has no
  // cached child or because another block has the same hash.
  bool is_leaf(BlockId id) const { return places_[id].num_children == 0 || !is_alone(id); }

  // Adds a block that was just inserted into the index with this key, as a child of this parent
  // (null, or the block itself: it has no parent). Appends other blocks that have become leaves, or
  // are no longer leaves, to `changed`.
  void add(BlockId id, uint64_t key, const Parent* parent, std::vector<BlockId>* changed);
  // Removes a block before it is erased from the index. Blocks that are not in the index are
  // only no candidates any more. `parent`: the key of its parent, if it has one. Appends to
  // `changed` like `add`.
  void remove(BlockId id, uint64_t parent, std::vector<BlockId>* changed);
  // `is_idle`: whether the block is cached, not held and not pinned. If it is also a leaf, it is a
  // candidate.
  void set_idle(BlockId id, bool is_idle) {
    if (!is_idle && !has(id)) return;  // usually because the block is held
    const bool is_in = is_idle && is_leaf(id);
    if (is_in == has(id)) return;
    places_[id].is_candidate = is_in;
    is_in ? order_->insert(id) : order_->remove(id);
  }
  // No block below `stop` is a candidate any more, and no block is cached.
  void clear(BlockId stop);
  size_t num_bytes() const;
  // Throws std::logic_error unless all counts agree with these blocks, which must be all blocks in
  // the index. `parent_of` returns the key of a block's parent.
  void check_invariants(const std::vector<BlockId>& indexed,
                        const std::function<uint64_t(BlockId)>& parent_of) const;

 private:
  struct Place {
    uint32_t num_children : 30;  // of its hash; 0 unless the block is the oldest under the hash
    uint32_t has_parent : 1;
    uint32_t is_candidate : 1;
  };

  bool is_alone(BlockId id) const { return blocks_[id].younger == id; }

  std::unique_ptr<EvictionOrder> order_;
  const HashIndex* index_;
  const Block* blocks_;
  ZeroedArray<Place> places_;
  // The number of children of each hash without a block, by key.
  std::unordered_map<uint64_t, uint32_t> orphans_;
};

}  // namespace kvcache
