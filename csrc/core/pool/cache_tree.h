// SPDX-License-Identifier: Apache-2.0
// The chains of cached blocks. A block should not be evicted before the cached blocks that follow
// it in a chain, because lookups would no longer find those blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/secret_key.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Identifies the blocks of a group with this `tag_of` a hash.
inline uint64_t key_of(uint8_t group, uint64_t tag) { return uint64_t{group} << 56 ^ tag; }
inline uint64_t key_of(const Block& block) { return key_of(block.group, tag_of(block.hash)); }

// Counts the cached children of each (hash, group). The counts are stored with the blocks published
// under the hash, and only their sum over the ring is meaningful. A child records the block that
// was its parent when it was added. If a hash with children has no block left, or its block was
// published after the children, the hash has an entry in a map. This is rare, except in pools of
// copies, which know parents only by tag. In these pools, every hash has an entry.
//
// Hashes are identified by tags. Two hashes of a group practically never have equal tags by chance.
// If they do, a block of one hash may count a child of the other hash as its own, and is then
// evicted later than necessary.
class CacheTree {
 public:
  CacheTree(const Block* blocks, int64_t num_blocks)
      : blocks_(blocks), places_(static_cast<size_t>(num_blocks)) {}

  // Whether lookups could still find all other cached blocks without this block, because it has no
  // cached child or because another block has the same hash.
  bool is_leaf(BlockId id) const {
    return places_[id].num_children == 0 || blocks_[id].younger != id;
  }
  // Each block has one mark bit for the caller's own use. Adding the block resets the bit.
  bool is_marked(BlockId id) const { return places_[id].is_marked != 0; }
  void mark(BlockId id, bool is_marked) { places_[id].is_marked = is_marked; }
  // Adds a block that was just published and is in the ring of its hash. `parent_tag`: tag of its
  // parent's hash; null for the first block of a chain. `parent`: a block under that hash; the null
  // block if there is none or, in a tree that finds parents by tag, if it is unknown. Appends other
  // blocks that have become leaves, or are no longer leaves, to `changed`.
  void add(BlockId id, BlockId parent, const uint64_t* parent_tag, std::vector<BlockId>* changed);
  // Removes a block before it leaves the ring of its hash. Blocks that were never added are
  // allowed. Appends blocks that become leaves, or are no longer leaves, to `changed`.
  void remove(BlockId id, uint64_t parent_tag, std::vector<BlockId>* changed);
  void clear();
  size_t num_bytes() const;
  // A published block, with the tags of its hash and of its parent's hash.
  struct Member {
    BlockId id;
    uint64_t tag, parent_tag;
  };
  // Throws std::logic_error unless all counts agree with the published blocks.
  void check_invariants(const std::vector<Member>& members) const;
  // Switches to finding parents by tags. `members`: the published blocks.
  void find_by_tag(const std::vector<Member>& members);
  bool finds_by_tag() const { return finds_by_tag_; }

 private:
  struct Place {
    // Parent when the block was added; kUnknown: the parent's hash had no block; null block: no
    // parent.
    BlockId parent;
    uint32_t num_children : 31;
    uint32_t is_marked : 1;
  };
  // An entry for a hash whose children may not have recorded a block under it. Contains one block
  // under the hash, or the number of children if there is none.
  struct Entry {
    BlockId block;
    int32_t num_children;
  };
  static constexpr BlockId kUnknown = -1;

  bool is_alone(BlockId id) const { return blocks_[id].younger == id; }
  bool is_known(BlockId parent, uint64_t key) const;
  void adopt(BlockId id, uint64_t key);
  BlockId block_at(uint64_t key) const;
  void drop_child(BlockId id, uint64_t parent_tag, std::vector<BlockId>* changed);
  void drop_child_of(BlockId parent, std::vector<BlockId>* changed);

  const Block* blocks_;
  ZeroedArray<Place> places_;
  std::unordered_map<uint64_t, Entry> entries_;  // keyed by group and tag
  bool finds_by_tag_ = false;
};

}  // namespace kvcache
