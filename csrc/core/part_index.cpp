#include "core/part_index.h"

#include <algorithm>

namespace kvcache {

void PartIndex::add(BlockId id, const Hash& hash, uint16_t group) {
  const Key key{hash, group};
  parts_[id].push_back(key);
  blocks_[key].push_back(id);
}

void PartIndex::forget(BlockId id) {
  const auto parts = parts_.find(id);
  if (parts == parts_.end()) return;
  for (const Key& key : parts->second) {
    const auto found = blocks_.find(key);
    std::vector<BlockId>& ids = found->second;
    ids.erase(std::find(ids.begin(), ids.end(), id));
    if (ids.empty()) blocks_.erase(found);
  }
  parts_.erase(parts);
}

void PartIndex::clear() {
  blocks_.clear();
  parts_.clear();
}

}  // namespace kvcache
