// SPDX-License-Identifier: Apache-2.0
// Pages with recurrent states: a page contains the state after the last token of its block.
//
// A step updates the state in place, in the page of the block that contains its last token. If the
// step enters another block, the plan first copies the state to the new page. The old page contains
// the state at the block boundary, and can be hit, only if a step ended exactly there. A state
// inside a block can be hit if a step of the prompt ended at a hash boundary. In that case, the
// next step also continues in another page.
//
// With n speculative blocks, n spare pages follow the page that contains a row's state. A step
// writes the state after its i-th draft to the i-th of these pages. If drafts are rejected, the row
// continues from the page of the last accepted draft. The pages swap places, and no state is
// copied.
#pragma once

#include <vector>

#include "core/groups/rules/page_rules.h"

namespace kvcache {

class StateRules final : public PageRules {
 public:
  constexpr StateRules()
      : PageRules({/*follows_sequence=*/true, /*has_hits=*/true, /*appends=*/false,
                   /*updates_in_place=*/true}) {}

  void demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
              const DemandFor& asked, GroupDemand* needs, int64_t* num_free) const override;
  LeastDemand least_demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                           const Span& span, const GroupDemand& needs) const override;
  ChunkDemand chunk_demand(const CacheGroup& group, const RowBlocks& held, const Span& first,
                           const Span& span) const override;
  // A state continues in its page up to the end of the page's block.
  int64_t quiet_until(const CacheGroup& group, const RowBlocks& held,
                      int64_t num_computed) const override {
    const bool may_change = held.num_alive() == 0 || held.keeps_state || group.num_speculative > 0;
    return may_change ? 0 : ceil_div(num_computed, group.block_size) * group.block_size;
  }
  // The state is loaded directly into the page in which the row continues.
  void take_host_page(RowBlocks* held, BlockId page) const override {
    held->host_source = page;
    held->num_dropped = held->num_published;
  }
  Take prepare(Growth* growth, const ServedRow& served, const CacheGroup& group,
               const GroupDemand& needs, int64_t* num_spare) const override;
  const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group, const Take& take,
                      const BlockId* own) const override;
  void give_up(Growth* growth, ServedRow* served, const CacheGroup& group,
               const GroupDemand& needs) const override;
  int64_t first_written(const CacheGroup& group, const Span& span) const override {
    return column_of(group, span);
  }
  void accept_drafts(Growth* growth, int32_t row, const CacheGroup& group,
                     const Span& span) const override;
  void fork(RowBlocks* held) const override {
    held->resize(std::min(held->size(), held->num_dropped + 1));  // drops the pages for drafts
  }
  bool shares_from(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                   int64_t start) const override;
  // A state contributes to all tokens computed since it entered its page, and to the next token.
  // Without the state, a row cannot continue at its position.
  int64_t first_token(const CacheGroup&, const RowBlocks& held, int64_t num_computed,
                      int64_t) const override {
    return std::min<int64_t>(held.state_start, num_computed - 1);
  }
  Columns computed(const RowBlocks& held, int64_t num_written, int64_t num_drafts) const override {
    if (held.num_alive() == 0) return {held.num_dropped, num_written};
    return {held.num_dropped + num_drafts, held.num_dropped + num_drafts + 1};
  }
  bool can_resume(const CacheGroup&, const RowBlocks&, const AdmissionInfo&,
                  int64_t) const override {
    return false;  // it was updated in place
  }
  void publish(Publishing* publishing, int32_t row, const CacheGroup& group,
               int64_t num_hashed) const override;
  void publish_left(Publishing* publishing, int32_t row, const CacheGroup& group,
                    int64_t num_tokens, BlockId page) const override;
  bool publishes_part(const AdmissionInfo& info, int64_t num_tokens) const override;
  std::vector<BlockId> leave_device(const Row& row, const CacheGroup& group,
                                    RowBlocks* held) const override;
  // A state that continues in a new page is loaded into that page.
  Returning returning(const CacheGroup& group, const RowBlocks& held,
                      const Span& span) const override {
    const bool moves = span.start > 0 && leaves_page(group, span, /*has_page=*/true);
    return {held.num_dropped, !moves};
  }
  bool may_share_onboard(const CacheGroup&, int64_t, int64_t) const override { return false; }

 private:
  static void keep(Publishing* publishing, int32_t row, const CacheGroup& group);
  // Returns the column of the row's first page.
  static int64_t column_of(const CacheGroup& group, const Span& span) {
    return (span.stop - span.num_drafts - 1) / group.block_size;
  }
  // Whether the state continues in a new page, because the row has no page or its page belongs to
  // an earlier block.
  static bool leaves_page(const CacheGroup& group, const Span& span, bool has_page) {
    return !has_page || column_of(group, span) >= ceil_div(span.start, group.block_size);
  }
  static bool moves(const SharedBlocks& holders, const CacheGroup& group, const RowBlocks& held,
                    const Span& span, bool gives_up);
  static void settle(Growth* growth, int32_t row, const CacheGroup& group, const Span& span,
                     bool keeps_passed);
  static void move(Growth* growth, ServedRow* served, const CacheGroup& group, BlockId page);
};

inline constexpr StateRules kStateRules;

}  // namespace kvcache
