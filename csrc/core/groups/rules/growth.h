// SPDX-License-Identifier: Apache-2.0
// The changes that page rules make to a row that is being served, and to the plan of the step. The
// manager implements them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"

namespace kvcache {

// A row that is being served by the current step.
struct ServedRow {
  int32_t row;
  Span span;
  int64_t safe_start;                          // tokens before this one do not depend on this step
  std::array<int64_t, kMaxGroups> num_before;  // blocks per group in the worker's table

  void depends_from(int64_t token) {
    if (token < safe_start) safe_start = token;
  }
};

class Growth {
 public:
  virtual RowBlocks& held(int32_t row, const CacheGroup& group) const = 0;
  // See SharedBlocks.
  virtual bool is_shared(BlockId id) const = 0;
  // Whether a step builds a plan. Otherwise, the caller maintains its own tables.
  virtual bool is_step() const = 0;

  // Sections of the plan.
  virtual void replace(int32_t row, const CacheGroup& group, int64_t column, BlockId id) = 0;
  virtual void copy(BlockId source, BlockId target) = 0;
  virtual void zero(BlockId page) = 0;

  // Loads a host page into a block, and takes over one reference to the page.
  virtual void onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
                       BlockId block, bool is_hit) = 0;
  // Replaces a shared block with `own`, and copies the content if `copies` is true.
  virtual void replace_shared(ServedRow* served, const CacheGroup& group, int64_t column,
                              BlockId own, bool copies) = 0;
  // Copies the part of a hit that ends inside a block into the row's own block.
  virtual void copy_source(ServedRow* served, const CacheGroup& group, BlockId own) = 0;

  // Records that the row no longer holds the block in this column.
  virtual void note_dropped(int32_t row, const CacheGroup& group, int64_t column, BlockId id) = 0;
  // Releases blocks that the row has dropped.
  virtual void release(int32_t row, const std::vector<BlockId>& ids) = 0;
  // Records a page in this column that contains the state after num_tokens tokens. The row releases
  // the page after all rows of the step have been served.
  virtual void leave(int32_t row, const CacheGroup& group, int64_t column, BlockId page,
                     int64_t num_tokens) = 0;
  // Removes the block's hash, because its content is about to be overwritten.
  virtual void evict(BlockId id) = 0;

 protected:
  ~Growth() = default;
};

}  // namespace kvcache
