// SPDX-License-Identifier: Apache-2.0
#include "core/pool/cache_tree.h"

#include <map>

#include "core/errors.h"

namespace kvcache {

// Whether this former parent is still published under the same hash. If there are no entries, no
// block with children has been removed.
bool CacheTree::is_known(BlockId parent, uint64_t key) const {
  if (parent <= kNullBlock || entries_.empty()) return parent > kNullBlock;
  return blocks_[parent].older != kNullBlock && key_of(blocks_[parent]) == key;
}

// Assigns to this block the children that were added before any block under its hash.
void CacheTree::adopt(BlockId id, uint64_t key) {
  const auto found = finds_by_tag_ ? entries_.try_emplace(key).first : entries_.find(key);
  if (found == entries_.end()) return;
  places_[id].num_children = static_cast<uint32_t>(found->second.num_children);
  found->second = {id, 0};
}

BlockId CacheTree::block_at(uint64_t key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? kNullBlock : found->second.block;
}

void CacheTree::add(BlockId id, BlockId parent, const uint64_t* parent_tag,
                    std::vector<BlockId>* changed) {
  const Block& block = blocks_[id];
  places_[id] = {};
  if (is_alone(id)) {
    if (finds_by_tag_ || !entries_.empty()) adopt(id, key_of(block));
  } else if (block.older == block.younger) {
    changed->push_back(block.older);  // it was the only block of its ring
  }
  if (parent_tag == nullptr) return;
  const uint64_t key = key_of(block.group, *parent_tag);
  if (parent == kNullBlock && finds_by_tag_) parent = block_at(key);
  if (parent == kNullBlock) {
    ++entries_[key].num_children;
    places_[id].parent = kUnknown;
    return;
  }
  places_[id].parent = parent;
  if (++places_[parent].num_children == 1 && is_alone(parent)) changed->push_back(parent);
}

// Decrements the count in any block of the ring, because only the sum over the ring matters.
inline void CacheTree::drop_child_of(BlockId parent, std::vector<BlockId>* changed) {
  BlockId each = parent;
  while (places_[each].num_children == 0) {
    each = blocks_[each].younger;
    if (each == parent) return;
  }
  if (--places_[each].num_children == 0 && is_alone(parent)) changed->push_back(parent);
}

void CacheTree::remove(BlockId id, uint64_t parent_tag, std::vector<BlockId>* changed) {
  const Block& block = blocks_[id];
  if (block.older == kNullBlock) return;  // the block is in no ring
  Place& place = places_[id];
  const bool leaves_children = place.num_children > 0;
  if (!is_alone(id)) {
    const BlockId twin = block.younger;
    places_[twin].num_children += place.num_children;
    if (block.older == twin) changed->push_back(twin);  // it is now the only block of its ring
    // Children may refer to this block, which is no longer their parent.
    if (leaves_children || entries_.count(key_of(block)) > 0) entries_[key_of(block)] = {twin, 0};
  } else if (leaves_children) {
    entries_[key_of(block)] = {kNullBlock, static_cast<int32_t>(place.num_children)};
  } else if (!entries_.empty()) {
    entries_.erase(key_of(block));
  }
  place.num_children = 0;
  if (place.parent > kNullBlock && entries_.empty()) {
    drop_child_of(place.parent, changed);
  } else if (place.parent != kNullBlock) {
    drop_child(id, parent_tag, changed);
  }
  place.parent = kNullBlock;
}

void CacheTree::drop_child(BlockId id, uint64_t parent_tag, std::vector<BlockId>* changed) {
  const uint64_t key = key_of(blocks_[id].group, parent_tag);
  if (is_known(places_[id].parent, key)) return drop_child_of(places_[id].parent, changed);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return;
  if (found->second.block != kNullBlock) return drop_child_of(found->second.block, changed);
  if (--found->second.num_children == 0) entries_.erase(found);
}

void CacheTree::find_by_tag(const std::vector<Member>& members) {
  for (const Member& each : members) {
    entries_[key_of(blocks_[each.id].group, each.tag)] = {each.id, 0};
  }
  finds_by_tag_ = true;
}

void CacheTree::clear() {
  entries_.clear();
  places_.zero();
}

size_t CacheTree::num_bytes() const {
  constexpr size_t kEntryBytes = sizeof(std::pair<uint64_t, Entry>) + 2 * sizeof(void*);
  return places_.num_bytes() + entries_.size() * kEntryBytes +
         entries_.bucket_count() * sizeof(void*);
}

void CacheTree::check_invariants(const std::vector<Member>& members) const {
  std::map<uint64_t, int64_t> num_children, num_counted;
  for (const Member& each : members) {
    const uint8_t group = blocks_[each.id].group;
    const uint64_t key = key_of(group, each.tag);
    num_counted[key] += int64_t{places_[each.id].num_children};
    require(!finds_by_tag_ || block_at(key) != kNullBlock, "a hash is not found by its tag");
    if (places_[each.id].parent != kNullBlock) ++num_children[key_of(group, each.parent_tag)];
  }
  for (const auto& [key, entry] : entries_) {
    if (entry.block == kNullBlock) {
      require(entry.num_children > 0 && num_counted.count(key) == 0, "children wait for a block");
      num_counted[key] = entry.num_children;
      continue;
    }
    const Block& block = blocks_[entry.block];
    require(entry.num_children == 0 && block.older != kNullBlock &&
                key_of(block.group, tag_of(block.hash)) == key,
            "an entry names a block with a different hash");
  }
  for (const auto& [key, num] : num_counted) {
    const auto found = num_children.find(key);
    require(num == (found == num_children.end() ? 0 : found->second),
            "the number of children of a hash is wrong");
    if (found != num_children.end()) num_children.erase(found);
  }
  require(num_children.empty(), "children of a hash are not counted");
}

}  // namespace kvcache
