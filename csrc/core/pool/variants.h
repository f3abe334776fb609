// What tells contents apart whose hashes are equal.
//
// The interoperable hash names an image's identifier and where it begins, not how many tokens it
// has. Two requests that give one identifier different lengths may have equal hashes and other KV:
// a pool notes the variant of such content beside its hash, and finds it only for a chain of the
// same variant. Content without images has variant 0, and costs nothing here.
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
  // Of a block that is not noted yet.
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

// Whether content of variant `found` is what is asked for; 0 asks for any.
inline bool is_variant(uint64_t found, uint64_t asked) { return asked == 0 || found == asked; }

}  // namespace kvcache
