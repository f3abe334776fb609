// Blocks that rows of the step at hand fill, and that later rows of it may share.
//
// Invariant: knows nothing of an earlier step once the next one has begun.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "core/hash.h"

namespace kvcache {

class StepFills {
 public:
  void begin() { rows_.clear(); }
  void add(BlockId id, int32_t row) { rows_[id] = row; }

  // The row that fills the block in this step; -1: none does.
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
