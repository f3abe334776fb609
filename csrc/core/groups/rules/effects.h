// SPDX-License-Identifier: Apache-2.0
// Everything that page rules see and change besides the blocks that they are given.
//
// This is the interface between the rules and the manager, which implements it: `Growth` while a
// row is served (RowGrowth), and `Publishing` once blocks are filled (Publisher).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/row.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"

namespace kvcache {

// A row that is being served by the current step.
struct ServedRow {
  ServedRow() = default;
  ServedRow(int32_t of, const Span& served) : row(of), span(served), safe_start(served.start) {}

  int32_t row;
  Span span;
  int64_t safe_start;                          // tokens before this one do not depend on this step
  std::array<int64_t, kMaxGroups> num_before;  // blocks per group in the worker's table

  void depends_from(int64_t token) {
    if (token < safe_start) safe_start = token;
  }
};

class HeldBlocks {
 public:
  virtual RowBlocks& held(int32_t row, const CacheGroup& group) const = 0;

 protected:
  ~HeldBlocks() = default;
};

// Changes of a row that is being served, and of the plan of the step.
class Growth : public HeldBlocks {
 public:
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

class Publishing : public HeldBlocks {
 public:
  virtual const Row& row(int32_t row) const = 0;
  virtual const AdmissionInfo& info(int32_t row) const = 0;
  // Whether a block is published under this hash of a part of a block.
  virtual bool has_part(const Hash& hash, const CacheGroup& group) const = 0;

  // Publishes the row's blocks, starting with first_block.
  virtual void publish_run(int32_t row, const CacheGroup& group, int64_t first_block,
                           const BlockId* ids, int64_t n) = 0;
  // Publishes the part of a block that ends with this hash block of the row.
  virtual void publish_part(int32_t row, const CacheGroup& group, int64_t block, int64_t hash) = 0;
  // Must be called after a change that affects the next blocks of the row (see RowTable).
  virtual void disturb(int32_t row) = 0;

 protected:
  ~Publishing() = default;
};

// Replaces the first num_shared shared blocks to which the row writes. Returns the first block of
// `own` that was not used. `copies_all`: even a block that begins in the span has earlier content.
inline const BlockId* replace_shared_blocks(Growth* growth, ServedRow* served,
                                            const CacheGroup& group, int64_t num_shared,
                                            const BlockId* own, bool copies_all) {
  const RowBlocks& held = growth->held(served->row, group);
  const int64_t start = served->span.start;
  for (int64_t block = start / group.block_size; num_shared > 0; ++block) {
    const int64_t column = block % group.max_blocks;  // differs in circular buffers
    if (column >= held.size() || !growth->is_shared(held[column])) continue;
    growth->replace(served->row, group, column, *own);
    // Without tokens of the row, the block need not be copied.
    const bool copies = copies_all || block * group.block_size < start;
    growth->replace_shared(served, group, column, *own++, copies);
    --num_shared;
  }
  return own;
}

}  // namespace kvcache
