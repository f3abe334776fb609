// SPDX-License-Identifier: Apache-2.0
// Counts the rows and temporary holders that hold a block.
#pragma once

#include <cstdint>

#include "core/groups/shared_blocks.h"
#include "core/manager/row_context.h"

namespace kvcache {

class BlockHolders final : public SharedBlocks {
 public:
  explicit BlockHolders(const RowContext& context) : SharedBlocks(context.pool), c_(context) {}

  // The number of rows that hold the block. References of connectors and onboards do not count.
  int64_t num_rows(BlockId id) const { return num_users(id) - c_.frees->num_kept_of(id); }

 private:
  bool has_many_users(BlockId id) const override {
    return num_users(id) - c_.plan->num_held(id) > 1;
  }
  int64_t num_users(BlockId id) const {  // rows, and blocks kept for connectors
    const int64_t n = pool_->ref_count(id) - c_.frees->num_waiting_of(id);
    return c_.host == nullptr ? n : n - c_.host->num_onboards_into(id);
  }

  RowContext c_;
};

}  // namespace kvcache
