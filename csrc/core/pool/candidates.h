// SPDX-License-Identifier: Apache-2.0
// The blocks from which an order chooses its victim. All of them are leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/pool/cache_tree.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

class Candidates {
 public:
  Candidates(std::unique_ptr<EvictionOrder> order, const HashIndex* index, const Block* blocks,
             int64_t num_blocks)
      : order_(std::move(order)), tree_(index, blocks, num_blocks) {}

  EvictionOrder& order() const { return *order_; }
  CacheTree& tree() { return tree_; }
  const CacheTree& tree() const { return tree_; }
  bool has(BlockId id) const { return tree_.is_marked(id); }

  // `is_idle`: whether the block is cached, not held and not pinned. If it is also a leaf, it is a
  // candidate.
  void set_idle(BlockId id, bool is_idle) {
    if (!is_idle && !has(id)) return;  // usually because the block is held
    const bool is_in = is_idle && tree_.is_leaf(id);
    if (is_in == has(id)) return;
    tree_.mark(id, is_in);
    is_in ? order_->insert(id) : order_->remove(id);
  }

  // No block below `stop` is a candidate any more, and no block is cached.
  void clear(BlockId stop) {
    for (BlockId id = 1; id < stop; ++id) set_idle(id, false);
    tree_.clear();
  }
  size_t num_bytes() const { return order_->num_bytes() + tree_.num_bytes(); }

 private:
  std::unique_ptr<EvictionOrder> order_;
  CacheTree tree_;
};

}  // namespace kvcache
