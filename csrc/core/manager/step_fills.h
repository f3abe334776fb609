// SPDX-License-Identifier: Apache-2.0
// Blocks that rows of the current step fill and that later rows of the step may share.
//
// Invariant: contains only blocks of the current step.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "core/hash.h"

namespace kvcache {

class StepFills {
 public:
  void begin() { rows_.clear(); }
  void add(BlockId id, int32_t row) { rows_[id] = row; }

  // Returns the row that fills the block in this step, or -1.
  int32_t row_of(BlockId id) const {
    if (rows_.empty()) return -1;
    const auto found = rows_.find(id);
    return found == rows_.end() ? -1 : found->second;
  }
  bool fills(BlockId id) const { return row_of(id) >= 0; }

 private:
  std::unordered_map<BlockId, int32_t> rows_;
};

}  // namespace kvcache
