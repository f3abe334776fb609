// SPDX-License-Identifier: Apache-2.0
// Counts the rows and temporary holders that hold a block.
#pragma once

#include <cstdint>

#include "core/groups/shared_blocks.h"
#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/plan_builder.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class BlockHolders final : public SharedBlocks {
 public:
  // `host`: null without a host tier.
  BlockHolders(const BlockPool* pool, const DeferredFrees* frees, const HostTier* host,
               const PlanBuilder* plan)
      : SharedBlocks(pool), frees_(frees), host_(host), plan_(plan) {}

  // The number of rows that hold the block. References of connectors and onboards do not count.
  int64_t num_rows(BlockId id) const { return num_users(id) - frees_->num_kept_of(id); }

 private:
  bool has_many_users(BlockId id) const override { return num_users(id) - plan_->num_held(id) > 1; }
  int64_t num_users(BlockId id) const {  // rows, and blocks kept for connectors
    const int64_t n = pool_->ref_count(id) - frees_->num_waiting_of(id);
    return host_ == nullptr ? n : n - host_->num_onboards_into(id);
  }

  const DeferredFrees* frees_;
  const HostTier* host_;
  const PlanBuilder* plan_;
};

}  // namespace kvcache
