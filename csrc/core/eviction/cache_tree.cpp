#include "core/eviction/cache_tree.h"

#include <stdexcept>

namespace kvcache {

namespace {

uint64_t key_of(uint8_t group, uint32_t tag) { return uint64_t{group} << 32 | tag; }

}  // namespace

CacheTree::Node* CacheTree::node_at(uint64_t key) {
  return &nodes_.emplace(key, Node{key, 0, kNullBlock}).first->second;
}

void CacheTree::drop_if_unused(Node* node) {
  if (node->num_children == 0 && node->first == kNullBlock) nodes_.erase(node->key);
}

void CacheTree::append_blocks(const Node& node, std::vector<BlockId>* out) const {
  for (BlockId id = node.first; id != kNullBlock; id = places_[id].next) out->push_back(id);
}

void CacheTree::add(BlockId id, uint32_t tag, const uint32_t* parent, uint8_t group,
                    std::vector<BlockId>* changed) {
  Place& place = places_[id];
  Node* own = node_at(key_of(group, tag));
  if (own->first != kNullBlock) changed->push_back(own->first);  // if it was the only one
  place = {own, nullptr, own->first, kNullBlock};
  if (own->first != kNullBlock) places_[own->first].prev = id;
  own->first = id;
  if (parent == nullptr) return;
  place.parent = node_at(key_of(group, *parent));
  if (place.parent->num_children++ == 0) append_blocks(*place.parent, changed);
}

void CacheTree::remove(BlockId id, std::vector<BlockId>* changed) {
  const Place place = places_[id];
  if (place.own == nullptr) return;
  places_[id] = {};
  (place.prev == kNullBlock ? place.own->first : places_[place.prev].next) = place.next;
  if (place.next != kNullBlock) places_[place.next].prev = place.prev;
  if (place.own->first != kNullBlock)
    changed->push_back(place.own->first);  // if it is the only one
  drop_if_unused(place.own);
  if (place.parent == nullptr) return;
  if (--place.parent->num_children == 0) append_blocks(*place.parent, changed);
  drop_if_unused(place.parent);
}

void CacheTree::clear() {
  nodes_.clear();
  places_.zero();
}

size_t CacheTree::num_bytes() const {
  constexpr size_t kNodeBytes = sizeof(Node) + 3 * sizeof(void*);  // with the map's own links
  return places_.num_bytes() + nodes_.size() * kNodeBytes + nodes_.bucket_count() * sizeof(void*);
}

void CacheTree::check_invariants(int64_t num_blocks, int64_t num_added) const {
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::logic_error(what);
  };
  std::unordered_map<uint64_t, int64_t> num_children;
  int64_t num_found = 0, num_listed = 0;
  for (int64_t id = 1; id < num_blocks; ++id) {
    if (places_[id].own == nullptr) continue;
    ++num_found;
    if (places_[id].parent != nullptr) ++num_children[places_[id].parent->key];
  }
  require(num_found == num_added, "the tree holds other blocks than are cached");
  for (const auto& [key, node] : nodes_) {
    require(node.key == key, "a node of the tree has another's key");
    require(node.num_children > 0 || node.first != kNullBlock, "a node of the tree is unused");
    const auto counted = num_children.find(key);
    require(node.num_children == (counted == num_children.end() ? 0 : counted->second),
            "a node of the tree counts its children wrongly");
    BlockId before = kNullBlock;
    for (BlockId id = node.first; id != kNullBlock; before = id, id = places_[id].next) {
      require(places_[id].own == &node && places_[id].prev == before,
              "blocks under one hash are linked wrongly");
      ++num_listed;
    }
  }
  require(num_listed == num_added, "a block is not listed under its hash");
}

}  // namespace kvcache
