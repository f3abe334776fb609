// SPDX-License-Identifier: Apache-2.0
// The blocks of one row in one group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// Invariant: a block is null if and only if its column is below num_dropped.
struct RowBlocks {
  // Blocks of the sequence or of an encoder, by column; null: dropped. For states, the first
  // non-null page is the page in which a step continues, followed by one page per draft.
  std::vector<BlockId> blocks;
  int64_t num_dropped = 0;  // number of leading blocks that are null
  // Number of leading blocks that are published or will never be published.
  int64_t num_published = 0;
  int32_t num_hits = 0;  // number of leading blocks that the row has not computed
  // For has_partial: number of leading hash blocks that are published or will never be published.
  int32_t num_partial = 0;
  // For states: the number of tokens that the state summarized when it entered the first page.
  int32_t state_start = 0;
  // For states: whether the first page contains a published state inside a block. The next step
  // then writes to another page or, if none is available, gives up the published state.
  bool keeps_state = false;
  // Set while the row is served: the block to copy or the host page to load into the row's next
  // block.
  BlockId source = kNullBlock, host_source = kNullBlock;

  int64_t size() const { return static_cast<int64_t>(blocks.size()); }
  int64_t num_alive() const { return size() - num_dropped; }  // blocks that are not null
  BlockId& operator[](int64_t block) { return blocks[static_cast<size_t>(block)]; }
  BlockId operator[](int64_t block) const { return blocks[static_cast<size_t>(block)]; }
  // For states: moves this page to this column, followed by the pages for drafts.
  void set_pages(int64_t column, BlockId page, const std::vector<BlockId>& spare) {
    blocks.assign(static_cast<size_t>(column), kNullBlock);
    blocks.push_back(page);
    blocks.insert(blocks.end(), spare.begin(), spare.end());
    num_dropped = column;
  }
  // Counts only blocks among the first n as hits.
  void lower_hits(int64_t n) { num_hits = static_cast<int32_t>(std::min<int64_t>(num_hits, n)); }
  void resize(int64_t size) { blocks.resize(static_cast<size_t>(size), kNullBlock); }

  // Appends blocks. A full row doubles its capacity, up to `most` blocks, so that the row is rarely
  // copied while it generates tokens.
  void append(const BlockId* ids, int64_t n, int64_t most) {
    const auto needed = blocks.size() + static_cast<size_t>(n);
    if (needed > blocks.capacity()) {
      blocks.reserve(std::max(needed, std::min(2 * needed, static_cast<size_t>(most))));
    }
    blocks.insert(blocks.end(), ids, ids + n);
  }

  // Removes all blocks; the memory is kept for reuse.
  void clear() {
    blocks.clear();
    num_dropped = num_published = 0;
    num_hits = num_partial = state_start = 0;
    source = host_source = kNullBlock;
    keeps_state = false;
  }
};

// Must fit into one cache line, because a step reads one object per row and group.
static_assert(sizeof(RowBlocks) <= 64);

}  // namespace kvcache
