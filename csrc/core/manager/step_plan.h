// The answers of the manager.
#pragma once

#include <cstdint>
#include <vector>

#include "core/hash.h"

namespace kvcache {

enum class Status : uint8_t { kServed = 0, kWait = 1, kNever = 2 };

// The answers and the changes of a step, ragged by row where it says so.
struct StepPlan {
  int64_t step_id = -1;
  int64_t previous_step_id = -1;  // the last step before it that was not aborted; -1: none
  // The first answers are to running rows, the next to rows that were to leave, the others to
  // requests.
  int64_t num_running = 0, num_leaving = 0;
  std::vector<int32_t> rows;  // per answer; -1: got none
  std::vector<uint8_t> status;
  std::vector<int32_t> num_computed_tokens;  // where the row's new tokens start
  std::vector<int32_t> num_tokens;           // that the row got slots for; 0 where not served
  std::vector<int32_t> clear_rows;
  std::vector<int32_t> append_rows;
  struct Group {
    std::vector<int32_t> append_splits, append_ids;
    std::vector<int32_t> replace;  // (row, block of the sequence, id) each
  };
  std::vector<Group> groups;
  std::vector<int32_t> swap_out;  // (device page, host page) each
  std::vector<int32_t> copy;      // (source, destination) each
  std::vector<int32_t> zero;
  std::vector<int32_t> swap_in;     // (host page, device page) each
  std::vector<int32_t> depends_on;  // (row, row of the step that fills blocks it reads) each

  void clear();
  // Whether a worker has nothing to do: no page moves and no table changes.
  bool is_empty() const;
};

// The answer to one request.
struct Slots {
  Status status;
  int32_t row = -1;
  std::vector<std::vector<BlockId>> new_blocks;  // per group
  std::vector<BlockId> copies;                   // (source, destination) each: copy-on-write
};

// Rows whose KV is not what it was: each has only so many computed tokens left.
struct Recompute {
  std::vector<int32_t> rows, num_computed_tokens;
};

}  // namespace kvcache
