// SPDX-License-Identifier: Apache-2.0
// Pages with the KV of an encoder's tokens.
//
// A row allocates these pages at admission and holds them until it is freed. The pages do not grow
// with the sequence, and are never hit, published, rewritten or recomputed.
#pragma once

#include "core/groups/rules/effects.h"

namespace kvcache {

class EncoderRules final : public PageRules {
 public:
  constexpr EncoderRules()
      : PageRules({/*follows_sequence=*/false, /*has_hits=*/false, /*appends=*/false,
                   /*updates_in_place=*/false}) {}

  int64_t num_upfront(const CacheGroup& group, const TokenChain& chain) const override {
    return ceil_div(chain.num_encoder_tokens(), group.block_size);
  }
  void demand(const DemandBasis&, const CacheGroup&, const RowBlocks&, const DemandFor&,
              GroupDemand*, int64_t*) const override {}
  ChunkDemand chunk_demand(const CacheGroup&, const RowBlocks&, const Span&,
                           const Span&) const override {
    return {0, 0, 0};
  }
  int64_t quiet_until(const CacheGroup&, const RowBlocks&, int64_t) const override {
    return kUnbounded;
  }
  const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group, const Take& take,
                      const BlockId* own) const override {
    RowBlocks& held = growth->held(served->row, group);
    held.blocks.insert(held.blocks.end(), own, own + take.num_new);
    return own + take.num_new;
  }
  bool shares_from(const SharedBlocks&, const CacheGroup&, const RowBlocks&,
                   int64_t) const override {
    return false;  // encoder blocks are not written again
  }
  // Every token reads every block.
  int64_t first_token(const CacheGroup&, const RowBlocks&, int64_t, int64_t) const override {
    return 0;
  }
  int64_t num_written(const CacheGroup&, const RowBlocks& held, int64_t) const override {
    return held.size();
  }
  bool can_resume(const CacheGroup&, const RowBlocks&, const AdmissionInfo&,
                  int64_t) const override {
    return true;
  }
  bool may_share_onboard(const CacheGroup&, int64_t, int64_t) const override { return true; }
};

inline constexpr EncoderRules kEncoderRules;

}  // namespace kvcache
