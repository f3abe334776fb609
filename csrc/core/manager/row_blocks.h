// The blocks that one row holds of one group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// Invariant: a block is null exactly where it lies below num_dropped.
struct RowBlocks {
  // By block of the sequence (kEncoder: of the encoder); null: dropped. kState: the first that is
  // not null is the page that a step goes on from; behind it lies one for each draft.
  std::vector<BlockId> blocks;
  int64_t num_dropped = 0;    // leading blocks that are null
  int64_t num_published = 0;  // leading blocks that are in the index, or never will be
  int32_t num_hits = 0;       // leading blocks that the row has not computed
  int32_t num_partial = 0;    // has_partial: leading hash blocks in the index, or never will be
  // kState: the first page was taken with the state after so many tokens.
  int32_t state_start = 0;
  // kState: the first page holds a state inside a block that is found. What comes next is written
  // to another page or, where there is none, the state is given up.
  bool keeps_state = false;
  // While the row is being served: the block that is to be copied into its next one, or the page of
  // the host that is to be loaded into it.
  BlockId source = kNullBlock, host_source = kNullBlock;

  int64_t size() const { return static_cast<int64_t>(blocks.size()); }
  int64_t num_alive() const { return size() - num_dropped; }  // blocks that are not null
  BlockId& operator[](int64_t block) { return blocks[static_cast<size_t>(block)]; }
  BlockId operator[](int64_t block) const { return blocks[static_cast<size_t>(block)]; }
  // kState: this page lies in this column, and those for drafts behind it.
  void set_pages(int64_t column, BlockId page, const std::vector<BlockId>& spare) {
    blocks.assign(static_cast<size_t>(column), kNullBlock);
    blocks.push_back(page);
    blocks.insert(blocks.end(), spare.begin(), spare.end());
    num_dropped = column;
  }
  // No more than so many blocks are hits.
  void lower_hits(int64_t n) { num_hits = static_cast<int32_t>(std::min<int64_t>(num_hits, n)); }
  void resize(int64_t size) { blocks.resize(static_cast<size_t>(size), kNullBlock); }

  // Nothing held; the memory stays for the next.
  void clear() {
    blocks.clear();
    num_dropped = num_published = 0;
    num_hits = num_partial = state_start = 0;
    source = host_source = kNullBlock;
    keeps_state = false;
  }
};

// Each row of a step reads one per group: no more than a cache line.
static_assert(sizeof(RowBlocks) <= 64);

}  // namespace kvcache
