// SPDX-License-Identifier: Apache-2.0
// Releases all blocks of rows that are freed, or the blocks after a row's valid tokens.
//
// Invariant: before blocks are released, the eviction policy is notified, and the journal records
// the blocks that cannot be found otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/clock.h"
#include "core/manager/row_context.h"
#include "core/pool/block_listener.h"

namespace kvcache {

// The names under which the blocks of freed rows are kept, one per row, or none.
using KeptNames = std::vector<std::string>;

class RowRelease {
 public:
  RowRelease(const RowContext& context, const Clock* clock) : c_(context), clock_(clock) {}

  // Releases the blocks of the row and frees the row. If plans contain the row, the next plan
  // clears it. `keep_as`: keeps the blocks under this name; null: does not.
  void leave(int32_t row, const ReleaseFeatures& features, const std::string* keep_as);

  // Called when hashes of held blocks are removed. From then on, lookups may fail to find a
  // published block.
  void note_forgotten() { has_forgotten_ = true; }

  // Notifies the eviction policy. Called before the blocks of the row are released.
  void notify_release(int32_t row, ReleaseFeatures features);

  // Releases the blocks of the row, tail first. `with_all`: includes blocks that do not follow the
  // sequence.
  void release_row(int32_t row, bool with_all, const std::string* keep_as = nullptr);

  // Restarts the row by releasing its blocks that follow the sequence.
  void let_go(int32_t row) {
    if (!c_.row(row).is_on_host()) note_left(row);
    release_row(row, /*with_all=*/false);
  }

  // Whether the row holds all blocks that the token at `num_tokens` reads, and the block to which
  // its KV is written.
  bool can_resume(int32_t row, int64_t num_tokens) const;
  // Truncates the row to num_tokens computed tokens, from which it must be able to resume.
  void truncate(int32_t row, int64_t num_tokens);

 private:
  void note_left(int32_t row) const;
  void notify_release_of(int32_t row, const CacheGroup& group, ReleaseFeatures* features) const;
  void notify_release_ends(int32_t row) const;
  void add_read_at(int64_t hit, const TokenChain& chain, const CacheGroup& group,
                   std::vector<BlockId>* ids) const;
  void keep(int32_t row, const std::string& name, std::vector<BlockId> ids);
  void note_onboards(int32_t row) const;

  RowContext c_;
  const Clock* clock_;
  int64_t num_releases_ = 0;
  bool has_forgotten_ = false;
};

}  // namespace kvcache
