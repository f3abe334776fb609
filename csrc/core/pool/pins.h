// SPDX-License-Identifier: Apache-2.0
// Blocks that callers want to keep cached. A pin is not a reference: pinned blocks are evicted if
// no other cached block is left.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

class Pins {
 public:
  explicit Pins(int64_t num_blocks) : counts_(static_cast<size_t>(num_blocks)) {}

  bool has(BlockId id) const { return counts_[id] > 0; }
  int64_t num_pinned() const { return num_pinned_; }  // blocks
  int64_t num_broken() const { return num_broken_; }
  void add(BlockId id) { num_pinned_ += counts_[id]++ == 0; }
  // Removes one pin from a pinned block.
  void take(BlockId id) { num_pinned_ -= --counts_[id] == 0; }
  // Called when the block is no longer cached. `evicted`: whether it was evicted to free space.
  void forget(BlockId id, bool evicted) {
    if (!has(id)) return;
    counts_[id] = 0;
    --num_pinned_;
    num_broken_ += evicted;
  }

  void clear() {
    counts_.zero();
    num_pinned_ = 0;
  }
  size_t num_bytes() const { return counts_.num_bytes(); }

 private:
  ZeroedArray<int32_t> counts_;
  int64_t num_pinned_ = 0;
  int64_t num_broken_ = 0;
};

}  // namespace kvcache
