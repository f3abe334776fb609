// SPDX-License-Identifier: Apache-2.0
// Which blocks are shared, as seen by page rules.
#pragma once

#include "core/hash.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class SharedBlocks {
 public:
  explicit SharedBlocks(const BlockPool* pool) : pool_(pool) {}

  // Whether the block is held by several rows, or by a row and a connector that may still read it.
  // A block that the current step has replaced by a copy is held until the step ends; that
  // reference does not count.
  bool is_shared(BlockId id) const {
    return id != kNullBlock && pool_->ref_count(id) != 1 && has_many_users(id);
  }

 protected:
  ~SharedBlocks() = default;
  virtual bool has_many_users(BlockId id) const = 0;

  const BlockPool* pool_;
};

}  // namespace kvcache
