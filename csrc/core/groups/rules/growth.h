// SPDX-License-Identifier: Apache-2.0
// Helpers with which several page rules allocate blocks to rows.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/groups/rules/page_rules.h"
#include "core/manager/block_holders.h"
#include "core/manager/row_context.h"

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

// A state page that its row releases after all rows of the step have been served.
struct LeftState {
  int32_t row;
  uint8_t group;
  BlockId page;
  int64_t num_tokens;   // tokens that the state summarizes
  int64_t first_token;  // first token that depends on this state
};

struct Growth {
  RowContext c;
  BlockHolders holders;
  std::vector<LeftState> left_states = {};
  std::vector<BlockId> pages_before = {};  // scratch: a row's pages of states, as in its table

  RowBlocks& held(int32_t row, const CacheGroup& group) const {
    return c.rows->blocks(row)[group.id];
  }
  // Loads a host page into a block, and takes over one reference to the page.
  void onboard(ServedRow* served, const CacheGroup& group, int64_t column, BlockId page,
               BlockId block, bool is_hit) const;
  // Replaces a shared block with `own`, and copies the content if `copies` is true.
  void replace_shared(ServedRow* served, const CacheGroup& group, int64_t column, BlockId own,
                      bool copies) const;
  // Copies the part of a hit that ends inside a block into the row's own block.
  void copy_source(ServedRow* served, const CacheGroup& group, BlockId own) const;
};

}  // namespace kvcache
