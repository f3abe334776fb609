// SPDX-License-Identifier: Apache-2.0
// Slot mapping on the CPU, for the ops and the host tables, in plain C++.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "worker/slot_formula.h"

namespace kvcache {

// Writes the slots of all tokens in all groups, and then -1 up to entry fill_to[g] in each group g
// (up to m.num_out if fill_to is null). If a token is invalid, returns an error message and writes
// nothing.
std::optional<std::string> map_slots(const SlotMapping& m, const int64_t* fill_to = nullptr);

// Returns the error message for the invalid token i. The row and the position are passed as
// arguments, because the arrays may be on a device.
inline std::string wrong_token(const SlotMapping& m, int64_t i, int32_t row, int64_t position) {
  if (m.bad_row(row)) {
    return std::string(m.query_start ? "the row of token " : "rows[") + std::to_string(i) +
           (m.query_start ? " is " : "] is ") + std::to_string(row) +
           ": expected -1 (a dummy request) to " + std::to_string(m.groups.num_rows - 1);
  }
  const std::string text = "positions[" + std::to_string(i) + "] is " + std::to_string(position);
  if (position < 0 || position >= m.groups.num_positions) {
    return text + ": expected 0 to " + std::to_string(m.groups.num_positions - 1) +
           ", because a row has no columns beyond them";
  }
  return text + ": expected less, because row " + std::to_string(row) + " holds no block for it";
}

// Returns the error message for entry r of query_start_loc.
inline std::string wrong_query_start(int64_t r, int64_t num_tokens) {
  return "query_start_loc[" + std::to_string(r) + "] is wrong: expected numbers from 0 to " +
         std::to_string(num_tokens) + " (the number of positions), in ascending order";
}

}  // namespace kvcache
