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
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/step_request.h"

namespace kvcache {

class RowSwap {
 public:
  struct Return {
    Demand demand;                          // on the device
    std::array<int64_t, kMaxGroups> first;  // per group: blocks below it stay behind
  };

  // Without a host no row may leave or come back. `caches_rows`: what a row takes to the
  // host is found there by others.
  RowSwap(const RowContext& context, Publisher* publisher, RowRelease* release, bool caches_rows)
      : c_(context), publisher_(publisher), release_(release), caches_rows_(caches_rows) {}

  // Blocks that hold KV of these rows, which are of one tier; shared ones count once.
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const;

  // Blocks of the device that rows on the host take: when they come back together and each then
  // gets num_slots[i] slots more, in this order, the most that they take at a time. `alone`: where
  // the device holds nothing else.
  struct BlocksBack {
    int64_t num_taken, alone;
  };
  BlocksBack num_blocks_back(const std::vector<int32_t>& rows,
                             const std::vector<int64_t>& num_slots) const;

  // Outside of steps: (device page, host page) each, and back, of all rows or, where they do not
  // fit, of none. Blocks that the device's cache still has do not move back: they are shared.
  std::optional<std::vector<BlockId>> swap_out(const std::vector<int32_t>& rows);
  std::optional<std::vector<BlockId>> swap_in(const std::vector<int32_t>& rows);

  // Within a step, before others are served: its rows that fit leave for the host; which have left.
  // Their answers come behind those of the rows served.
  std::vector<bool> leave(const StepRequest& request);
  void answer(const StepRequest& request, const std::vector<bool>& have_left);

  // The demand of a row on the host that a step is to serve: the pages that it still reads, and new
  // blocks.
  Return return_of(int32_t row, const Span& span, const DemandRules& rules) const;
  // Brings the row's pages back for a step, but for those that it does not read any more, and a
  // state that moves on.
  void move_in(int32_t row, int64_t start, const Return& back);

 private:
  struct Departure {             // of a row that fits on the host
    std::vector<BlockId> known;  // (block, page that holds the same already) each
    int64_t num_new;             // pages for the others
  };

  // Rows that move from here on share what they move; those before do not.
  void begin() { moved_.clear(); }
  bool leave(int32_t row);
  std::optional<Departure> departure_of(int32_t row) const;
  void move_out(int32_t row, const Departure& departure);
  void keep_state_alone(int32_t row, const CacheGroup& group) const;
  bool shares_onboard(const CacheGroup& group, int64_t column, int64_t start, BlockId page) const;
  void move_in(int32_t row, int64_t start, const Return* back);
  using Twins = std::unordered_map<BlockId, BlockId>;  // page -> block
  Twins cached_twins(const std::vector<int32_t>& rows) const;
  int64_t num_blocks_back(const std::vector<int32_t>& rows, const std::vector<int64_t>& num_slots,
                          const Twins& twins) const;
  void note_returned(int32_t row, const CacheGroup& group, int64_t num_shared, bool is_whole);

  RowContext c_;
  Publisher* publisher_;
  RowRelease* release_;
  bool caches_rows_;
  std::unordered_map<BlockId, BlockId> moved_;  // from -> to
};

}  // namespace kvcache
