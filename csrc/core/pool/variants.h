// SPDX-License-Identifier: Apache-2.0
// Distinguishes contents that differ although their hashes are equal.
//
// The interoperable hash contains an image's identifier and start, but not its number of tokens.
// Two requests that use the same identifier with different lengths may have equal hashes but
// different KV. A pool therefore records the variant of such content and returns it only for a
// chain of the same variant. Content without images has variant 0, at no cost.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "core/hash.h"

namespace kvcache {

class Variants {
 public:
  uint64_t of(BlockId id) const {
    if (by_block_.empty()) return 0;
    const auto found = by_block_.find(id);
    return found == by_block_.end() ? 0 : found->second;
  }
  // Records the variant of a block that has none yet.
  void note(BlockId id, uint64_t variant) {
    if (variant != 0) by_block_[id] = variant;
  }
  void forget(BlockId id) {
    if (!by_block_.empty()) by_block_.erase(id);
  }
  void clear() { by_block_.clear(); }

 private:
  std::unordered_map<BlockId, uint64_t> by_block_;
};

// Whether content of variant `found` matches `asked`; 0 matches any.
inline bool is_variant(uint64_t found, uint64_t asked) { return asked == 0 || found == asked; }

}  // namespace kvcache
