// SPDX-License-Identifier: Apache-2.0
#include "core/pool/candidates.h"

#include <map>

#include "core/errors.h"

namespace kvcache {

void Candidates::add(BlockId id, uint64_t key, const Parent* parent,
                     std::vector<BlockId>* changed) {
  const Block& block = blocks_[id];
  Place& place = places_[id];
  place = {};
  if (!is_alone(id)) {
    if (block.older == block.younger) changed->push_back(block.older);  // it was alone
  } else if (!orphans_.empty()) {
    const auto waiting = orphans_.extract(key);
    if (!waiting.empty()) place.num_children = waiting.mapped();
  }
  if (parent == nullptr || parent->key == key) return;
  place.has_parent = true;
  if (parent->oldest == kNullBlock) {
    ++orphans_[parent->key];
  } else if (++places_[parent->oldest].num_children == 1 && is_alone(parent->oldest)) {
    changed->push_back(parent->oldest);
  }
}

void Candidates::remove(BlockId id, uint64_t parent, std::vector<BlockId>* changed) {
  set_idle(id, false);
  const Block& block = blocks_[id];
  if (block.younger == kNullBlock) return;
  Place& place = places_[id];
  if (!is_alone(id)) {
    // Only the oldest block has a count, which the next oldest takes over.
    places_[block.younger].num_children += place.num_children;
    if (block.older == block.younger) changed->push_back(block.younger);  // it is now alone
  } else if (place.num_children > 0) {
    orphans_[key_of(block)] = place.num_children;
  }
  place.num_children = 0;
  if (!place.has_parent) return;
  place.has_parent = false;
  const BlockId oldest = index_->find(parent);
  if (oldest != kNullBlock) {
    if (--places_[oldest].num_children == 0 && is_alone(oldest)) changed->push_back(oldest);
    return;
  }
  const auto children = orphans_.find(parent);
  if (children != orphans_.end() && --children->second == 0) orphans_.erase(children);
}

void Candidates::clear(BlockId stop) {
  for (BlockId id = 1; id < stop; ++id) set_idle(id, false);
  orphans_.clear();
  places_.zero();
}

size_t Candidates::num_bytes() const {
  constexpr size_t kEntryBytes = sizeof(decltype(orphans_)::value_type) + 2 * sizeof(void*);
  return order_->num_bytes() + places_.num_bytes() + orphans_.size() * kEntryBytes +
         orphans_.bucket_count() * sizeof(void*);
}

void Candidates::check_invariants(const std::vector<BlockId>& indexed,
                                  const std::function<uint64_t(BlockId)>& parent_of) const {
  std::map<uint64_t, int64_t> num_children, num_counted;
  for (const BlockId id : indexed) {
    const Place& place = places_[id];
    if (place.has_parent) ++num_children[parent_of(id)];
    const uint64_t key = key_of(blocks_[id]);
    if (place.num_children == 0) continue;
    require(index_->find(key) == id, "a block that is not the oldest has children: ", id);
    num_counted[key] = place.num_children;
  }
  for (const auto& [key, num] : orphans_) {
    require(index_->find(key) == kNullBlock, "children wait for a block that is cached");
    num_counted[key] = num;
  }
  require(num_children == num_counted, "the number of children of a hash is wrong");
}

}  // namespace kvcache
