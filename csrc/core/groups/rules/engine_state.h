// SPDX-License-Identifier: Apache-2.0
// Pages with recurrent states and the states of drafts, if the engine copies states.
//
// With n speculative blocks, a row has 1 + n pages, starting at the column of the last token of the
// step, drafts included. The engine writes the state after the i-th draft to the i-th of the n
// pages, and reads the state of the last accepted draft from there. The engine's table of a running
// row only grows, so pages stay in their columns: a row that enters the next block continues in its
// first page for drafts, and one page is appended. Pages for drafts in columns that a chunk of a
// prompt skips are appended again.
//
// The row keeps the pages of earlier blocks until no draft can be rejected any more to a token in
// these blocks. The engine copies the state at the end of a block into the block's page. Blocks are
// therefore dropped and published like blocks of a sliding window of two tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "core/groups/rules/page_rules.h"

namespace kvcache {

class EngineStateRules final : public PageRules {
 public:
  constexpr EngineStateRules()
      : PageRules({/*follows_sequence=*/true, /*has_hits=*/true, /*appends=*/false,
                   /*updates_in_place=*/false}) {}

  void demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
              const DemandFor& asked, GroupDemand* needs, int64_t* num_free) const override;
  ChunkDemand chunk_demand(const CacheGroup& group, const RowBlocks& held, const Span& first,
                           const Span& span) const override;
  int64_t quiet_until(const CacheGroup& group, const RowBlocks& held,
                      int64_t num_computed) const override;
  Take prepare(Growth* growth, const ServedRow& served, const CacheGroup& group,
               const GroupDemand& needs, int64_t* num_spare) const override;
  const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group, const Take& take,
                      const BlockId* own) const override;
  bool shares_from(const SharedBlocks&, const CacheGroup&, const RowBlocks&,
                   int64_t) const override {
    return false;  // a row writes only to pages that it has allocated
  }
  bool can_resume(const CacheGroup&, const RowBlocks&, const AdmissionInfo&,
                  int64_t) const override {
    return false;  // the state was updated in place
  }
  void publish(Publishing* publishing, int32_t row, const CacheGroup& group,
               int64_t num_hashed) const override;

 private:
  // Whether the row has its 1 + n pages. Otherwise, it has none, or the page of a hit.
  static bool has_pages(const CacheGroup& group, const RowBlocks& held) {
    return held.num_alive() > group.num_speculative;
  }
  // The number of columns of a row whose last token, drafts included, is before token `stop`.
  static int64_t num_columns(const CacheGroup& group, int64_t stop) {
    return std::max<int64_t>(ceil_div(stop, group.block_size), 1) + group.num_speculative;
  }
};

inline constexpr EngineStateRules kEngineStateRules;

inline bool has_engine_states(const std::vector<CacheGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.rules == &kEngineStateRules; });
}

}  // namespace kvcache
