// Rows that leave the device for the host, and come back.
//
// Invariant: a row lives in one tier; a block or page that several rows of a call hold moves once.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/demand.h"
#include "core/manager/row_context.h"

namespace kvcache {

class RowSwap {
 public:
  struct Departure {             // of a row that fits on the host
    std::vector<BlockId> known;  // (block, page that holds the same already) each
    int64_t num_new;             // pages for the others
  };
  struct Return {
    Demand demand;                          // on the device
    std::array<int64_t, kMaxGroups> first;  // per group: blocks below it stay behind
  };

  // Without a host only `num_unique_blocks` may be called. `caches_rows`: what a row takes to the
  // host is found there by others.
  RowSwap(const RowContext& context, bool caches_rows) : c_(context), caches_rows_(caches_rows) {}

  // Blocks that hold KV of these rows, which are of one tier; shared ones count once.
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const;

  // Rows that move from here on share what they move; those before do not.
  void begin() { moved_.clear(); }

  // None where the row's blocks that are not there yet do not fit on the host.
  std::optional<Departure> departure_of(int32_t row) const;
  // Moves the row to the host. Lookahead blocks hold nothing: they are released.
  void move_out(int32_t row, const Departure& departure);

  // The demand of a row on the host that a step is to serve: the pages that it still reads, and new
  // blocks.
  Return return_of(int32_t row, const Span& span, const DemandRules& rules) const;
  // Brings the row's pages back for a step, but for those that it does not read any more, and a
  // state that moves on; or all of them.
  void move_in(int32_t row, int64_t start, const Return& back);
  void move_in(int32_t row);

 private:
  bool shares_onboard(const CacheGroup& group, int64_t column, int64_t start, BlockId page) const;
  void move_in(int32_t row, int64_t start, const Return* back);

  RowContext c_;
  bool caches_rows_;
  std::unordered_map<BlockId, BlockId> moved_;  // from -> to
};

}  // namespace kvcache
