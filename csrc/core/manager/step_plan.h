// SPDX-License-Identifier: Apache-2.0
// The results of the manager's calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/hash.h"

namespace kvcache {

enum class Status : uint8_t { kServed = 0, kWait = 1, kNever = 2 };

// The results and the changes of a step. Ragged arrays are grouped by row.
struct StepPlan {
  int64_t step_id = -1;
  int64_t previous_step_id = -1;  // last earlier step that was not aborted, or -1
  // Results for running rows come first, then results for rows to swap out, then results for new
  // requests.
  int64_t num_running = 0, num_leaving = 0;
  std::vector<int32_t> rows;  // one per result; -1: no row
  std::vector<uint8_t> status;
  std::vector<int32_t> num_computed_tokens;  // position at which the new tokens of the row start
  std::vector<int32_t> num_tokens;           // tokens with allocated slots; 0 if not served
  std::vector<int32_t> clear_rows;
  std::vector<int32_t> append_rows;
  struct Group {
    std::vector<int32_t> append_splits, append_ids;
    std::vector<int32_t> replace;  // (row, column, id) entries
  };
  std::vector<Group> groups;
  std::vector<int32_t> swap_out;  // (device page, host page) pairs
  std::vector<int32_t> copy;      // (source, destination) pairs
  std::vector<int32_t> zero;
  std::vector<int32_t> fresh;    // new pages that no other section fills
  std::vector<int32_t> swap_in;  // (host page, device page) pairs

  void clear() {
    for (std::vector<int32_t>* each : {&rows, &num_computed_tokens, &num_tokens, &clear_rows,
                                       &append_rows, &swap_out, &copy, &zero, &fresh, &swap_in}) {
      each->clear();
    }
    status.clear();
    num_running = num_leaving = 0;
    for (Group& group : groups) {
      group.append_splits.assign(1, 0);
      group.append_ids.clear();
      group.replace.clear();
    }
  }
  // Whether the worker has nothing to do, because no page moves and no table changes.
  bool is_empty() const {
    for (const std::vector<int32_t>* each :
         {&clear_rows, &append_rows, &swap_out, &copy, &zero, &fresh, &swap_in}) {
      if (!each->empty()) return false;
    }
    return std::all_of(groups.begin(), groups.end(),
                       [](const Group& group) { return group.replace.empty(); });
  }
};

// The result for one request.
struct Slots {
  Status status;
  int32_t row = -1;
  std::vector<std::vector<BlockId>> new_blocks;  // per group
  std::vector<BlockId> copies;  // (source, destination) pairs of copies for copy-on-write
};

// Rows whose KV has become invalid, and the number of computed tokens that each row keeps.
struct Recompute {
  std::vector<int32_t> rows, num_computed_tokens;
};

}  // namespace kvcache
