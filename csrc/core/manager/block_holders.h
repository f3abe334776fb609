// The holders of a block: rows, or others for a while.
#pragma once

#include <cstdint>

#include "core/manager/deferred_frees.h"
#include "core/manager/host_tier.h"
#include "core/manager/plan_builder.h"
#include "core/pool/block_pool.h"

namespace kvcache {

class BlockHolders {
 public:
  // `host`: null where there is none.
  BlockHolders(const BlockPool* pool, const DeferredFrees* frees, const HostTier* host,
               const PlanBuilder* plan)
      : pool_(pool), frees_(frees), host_(host), plan_(plan) {}

  // References of rows: not those of requests that have left, nor of onboards.
  int64_t num_rows(BlockId id) const { return num_users(id) - frees_->num_kept_of(id); }

  // Whether several rows hold the block, or a row and a connector that may still read it. One that
  // a row of this step has left for a copy of its own is held until the step ends, too.
  bool is_shared(BlockId id) const {
    if (id == kNullBlock || pool_->ref_count(id) == 1) return false;
    return num_users(id) - plan_->num_held(id) > 1;
  }

 private:
  int64_t num_users(BlockId id) const {  // rows, and what is kept for connectors
    const int64_t n = pool_->ref_count(id) - frees_->num_waiting_of(id);
    return host_ == nullptr ? n : n - host_->num_onboards_into(id);
  }

  const BlockPool* pool_;
  const DeferredFrees* frees_;
  const HostTier* host_;
  const PlanBuilder* plan_;
};

}  // namespace kvcache
