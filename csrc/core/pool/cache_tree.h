// The order of cached blocks in their chains. A block should not be evicted before its cached
// successors, because nothing would find them any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Counts the cached children of each hash of a group. The count lies with the blocks that are
// published under the hash: its sum over their ring is what counts. A child remembers the block
// that its parent was when it came. Where no block is left under a hash that has children, or one
// is published after them, the hash has an entry in a map; that is rare, but for pools of copies,
// whose blocks come with tags alone: there every hash has one.
//
// Hashes are known by their tags: where two of one group have the same, which none that was not
// searched for has, one may count a child of the other as its own, and is evicted later than it
// could be.
class CacheTree {
 public:
  CacheTree(const Block* blocks, int64_t num_blocks)
      : blocks_(blocks), places_(static_cast<size_t>(num_blocks)) {}

  // Whether no cached block is found only through this one: it has no cached child, or another
  // block has the same hash.
  bool is_leaf(BlockId id) const {
    return places_[id].num_children == 0 || blocks_[id].younger != id;
  }
  // A bit of each block for the caller, lost when it is added.
  bool is_marked(BlockId id) const { return places_[id].is_marked != 0; }
  void mark(BlockId id, bool is_marked) { places_[id].is_marked = is_marked; }
  // The block was just published, and is in the ring of its hash. `parent_tag`: of its parent's
  // hash; null for the first block of a chain. `parent`: a block under that hash; the null block
  // where there is none or, in a tree that finds by tag, where it is not known. Adds other blocks
  // that have become leaves, or no longer are, to `changed`.
  void add(BlockId id, BlockId parent, const uint64_t* parent_tag, std::vector<BlockId>* changed);
  // The block will leave the ring of its hash; it need not have been added. Adds blocks to
  // `changed` that will then have become leaves, or no longer be.
  void remove(BlockId id, uint64_t parent_tag, std::vector<BlockId>* changed);
  void clear();
  size_t num_bytes() const;
  // Throws std::logic_error unless all that is counted agrees with these blocks: the published
  // ones, with the tags of their hashes and of their parents'.
  struct Member {
    BlockId id;
    uint64_t tag, parent_tag;
  };
  void check_invariants(const std::vector<Member>& members) const;
  // From now on parents are found by their tags. `members`: what is published.
  void find_by_tag(const std::vector<Member>& members);
  bool finds_by_tag() const { return finds_by_tag_; }

 private:
  struct Place {
    BlockId parent;  // when it came; kUnknown: none was there; the null block: it has none
    uint32_t num_children : 31;
    uint32_t is_marked : 1;
  };
  // Of a hash whose children may know no block that has it: one that has it, or how many children
  // there are while none has.
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
  std::unordered_map<uint64_t, Entry> entries_;  // by group and tag
  bool finds_by_tag_ = false;
};

}  // namespace kvcache
