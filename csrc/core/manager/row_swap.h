// SPDX-License-Identifier: Apache-2.0
// Moves rows from the device to the host, and back.
//
// Invariant: each row is on exactly one tier. A block or page that several rows of a call hold is
// moved only once.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
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
    Demand demand;                          // demand on the device
    std::array<int64_t, kMaxGroups> first;  // first block to load, per group
  };

  // Rows can be moved only with a host tier.
  RowSwap(const RowContext& context, Publisher* publisher, RowRelease* release)
      : c_(context), publisher_(publisher), release_(release) {}

  // See Manager.
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const;

  // Numbers of device blocks. `alone`: assumes that the device holds nothing else.
  struct BlocksBack {
    int64_t num_taken, alone;
  };
  // Returns the maximum number of free device blocks that are needed if these rows are swapped in
  // together and then, in this order, num_slots[i] more slots are allocated to the i-th row.
  BlocksBack num_blocks_back(const std::vector<int32_t>& rows,
                             const std::vector<int64_t>& num_slots) const;

  // Called outside of steps. Moves all rows, or none if they do not all fit. Returns (device page,
  // host page) pairs; swap_in returns the reverse. Blocks that the device cache still contains are
  // shared by the rows instead of moving back.
  std::optional<std::vector<BlockId>> swap_out(const std::vector<int32_t>& rows);
  std::optional<std::vector<BlockId>> swap_in(const std::vector<int32_t>& rows);

  // Called within a step before rows are served. Moves the step's rows that fit to the host.
  // Returns which rows have moved. Their results follow the results for running rows.
  std::vector<bool> leave(const StepRequest& request);
  void answer(const StepRequest& request, const std::vector<bool>& have_left);

  // The demand of a row on the host that a step will serve, with the pages that it still reads and
  // new blocks.
  Return return_of(int32_t row, const Span& span, const DemandRules& rules) const;
  // Loads the pages of the row for a step, except pages that it no longer reads. A state that
  // continues in a new page is loaded there.
  void move_in(int32_t row, int64_t start, const Return& back);

 private:
  struct Departure {                                 // the move of a row that fits on the host
    std::vector<std::pair<BlockId, BlockId>> known;  // blocks with a page of the same content
    std::vector<BlockId> blocks;                     // the other blocks
  };

  // Starts a new call. Rows that are moved by the same call can share moved blocks. They do not
  // share them with rows of earlier calls.
  void begin() { moved_.clear(); }
  bool leave(int32_t row);
  std::optional<Departure> departure_of(int32_t row) const;
  BlockId page_of(BlockId id) const;
  void move_out(int32_t row, const Departure& departure);
  void take_pages(const Departure& departure, bool is_cached);
  // Whether another row has just loaded the same page and this row does not write to it next.
  bool shares_onboard(const CacheGroup& group, int64_t column, int64_t start, BlockId page) const {
    return moved_.count(page) != 0 && group.rules->may_share_onboard(group, column, start);
  }
  // A state that continues in a new page is loaded there. It is the only page of its row.
  static void leave_to_growth(RowBlocks* each) {
    if (each->num_alive() == 0) return;
    each->host_source = std::exchange(each->blocks.back(), kNullBlock);
    each->num_dropped = each->size();
  }
  void load_all(int32_t row);
  // Return the block of a page with a reference of the row. Another row has just loaded a shared
  // block.
  BlockId shared_block(BlockId page) {
    const BlockId id = moved_.at(page);
    c_.pool->retain(&id, 1);
    return id;
  }
  BlockId new_block(BlockId page);
  // Releases the pages `left` of a row whose blocks are on the device again.
  void arrive(int32_t row, std::vector<BlockId>* left);
  using Twins = std::unordered_map<BlockId, BlockId>;  // host page -> device block
  Twins cached_twins(const std::vector<int32_t>& rows) const;
  int64_t num_blocks_back(const std::vector<int32_t>& rows, const std::vector<int64_t>& num_slots,
                          const Twins& twins) const;
  // Marks the blocks that were loaded outside of a step as unpublished, except the first
  // `num_shared` blocks. They are published once their tokens are known to be computed. `is_whole`:
  // none of them is shared with another row.
  void note_returned(int32_t row, const CacheGroup& group, int64_t num_shared, bool is_whole) {
    const int64_t num_full = c_.row(row).num_computed / group.block_size;
    c_.held(row, group).num_published = is_whole ? std::min(num_shared, num_full) : num_full;
  }

  RowContext c_;
  Publisher* publisher_;
  RowRelease* release_;
  std::unordered_map<BlockId, BlockId> moved_;  // source -> destination
};

}  // namespace kvcache
