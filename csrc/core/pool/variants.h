// SPDX-License-Identifier: Apache-2.0
// Distinguishes contents that differ although their hashes are equal.
//
// The interoperable hash contains an image's identifier and start, but not its number of tokens.
// Two requests that use the same identifier with different lengths may have equal hashes but
// different KV. A pool therefore records the variant of such content and returns it only for a
// chain of the same variant. Content without images has variant 0, at no cost.
//
// The same record holds the adapter with which content was computed (ExtraKeys::adapter), so that
// the content of one adapter can be found. Content without an adapter has 0, at no cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/hash.h"

namespace kvcache {

class Variants {
 public:
  uint64_t of(BlockId id) const {
    if (by_block_.empty()) return 0;
    const auto found = by_block_.find(id);
    return found == by_block_.end() ? 0 : found->second.variant;
  }
  uint32_t adapter_of(BlockId id) const {
    const auto found = by_block_.find(id);
    return found == by_block_.end() ? 0 : found->second.adapter;
  }
  // Returns the blocks with content of this adapter, ascending.
  std::vector<BlockId> blocks_of(uint32_t adapter) const {
    std::vector<BlockId> out;
    for (const auto& [id, each] : by_block_) {
      if (each.adapter == adapter) out.push_back(id);
    }
    std::sort(out.begin(), out.end());
    return out;
  }
  // Records the variant and adapter of a block that has none yet.
  void note(BlockId id, uint64_t variant, uint32_t adapter) {
    if (variant != 0 || adapter != 0) by_block_[id] = {variant, adapter};
  }
  void forget(BlockId id) {
    if (!by_block_.empty()) by_block_.erase(id);
  }
  void clear() { by_block_.clear(); }

 private:
  struct Record {
    uint64_t variant;
    uint32_t adapter;
  };
  std::unordered_map<BlockId, Record> by_block_;
};

// Whether content of variant `found` matches `asked`; 0 matches any.
inline bool is_variant(uint64_t found, uint64_t asked) { return asked == 0 || found == asked; }

}  // namespace kvcache
