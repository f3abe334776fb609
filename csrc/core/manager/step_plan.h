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
  std::vector<int32_t> rows;  // per asked row: those served, swapped out, new; -1: got none
  std::vector<uint8_t> status;
  std::vector<int32_t> num_computed_tokens;  // where the row's new tokens start
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
  std::vector<int32_t> swap_in;  // (host page, device page) each

  void clear();
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
