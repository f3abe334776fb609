// SPDX-License-Identifier: Apache-2.0
// The blocks from which a policy may choose its victim. All of them are leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/pool/cache_tree.h"
#include "core/pool/eviction_policy.h"

namespace kvcache {

class Candidates {
 public:
  Candidates(std::unique_ptr<EvictionPolicy> policy, const Block* blocks, const uint16_t* epoch,
             int64_t num_blocks)
      : policy_(std::move(policy)), tree_(blocks, num_blocks) {
    policy_->attach({blocks, epoch});
  }

  EvictionPolicy& policy() { return *policy_; }
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
    is_in ? policy_->insert(id) : policy_->remove(id);
  }

  void clear() {
    policy_->clear();
    tree_.clear();
  }
  size_t num_bytes() const { return policy_->num_bytes() + tree_.num_bytes(); }

 private:
  std::unique_ptr<EvictionPolicy> policy_;
  CacheTree tree_;
};

}  // namespace kvcache
