// Rows that release their blocks: all when they leave, or those behind what is valid of them.
//
// Invariant: what is released is known to the journal, as far as nothing finds it otherwise, and to
// the eviction policy before it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/groups/cache_group.h"
#include "core/manager/clock.h"
#include "core/manager/row_context.h"

namespace kvcache {

// The fate of the blocks of a row that leaves.
struct Departure {
  int64_t after_step = -1;               // they wait until this step is done
  const std::string* keep_as = nullptr;  // they are kept under this name
};

// The same of several rows.
struct LeavingBlocks {
  int64_t after_step = -1;
  std::vector<std::string> keep_as = {};  // one name per row, or none

  Departure departure_of(int64_t i) const {
    return {after_step, keep_as.empty() ? nullptr : &keep_as[static_cast<size_t>(i)]};
  }
};

class RowRelease {
 public:
  RowRelease(const RowContext& context, int64_t hash_block_size, const Clock* clock)
      : c_(context), hash_block_size_(hash_block_size), clock_(clock) {}

  // The row releases its blocks and is free; the next plan clears it, if plans have it at all.
  void leave(int32_t row, const ReleaseFeatures& features, const Departure& departure);

  // Hashes were forgotten of blocks that rows hold: not all that was published is found.
  void note_forgotten() { has_forgotten_ = true; }

  // For the eviction policy, before the row's blocks are released.
  void notify_release(int32_t row, ReleaseFeatures features);

  // All blocks of the row, tail first; `with_encoder`: those of an encoder, too.
  void release_row(int32_t row, bool with_encoder, const Departure& departure = {});

  // The row starts anew: it lets go of all but an encoder's blocks.
  void let_go(int32_t row);

  // Whether the row's own blocks hold all that the token at `num_tokens` reads, and the block that
  // it goes into.
  bool can_resume(int32_t row, int64_t num_tokens) const;
  // Takes the row, which can resume there, back to so many computed tokens.
  void truncate(int32_t row, int64_t num_tokens);

 private:
  void note_left(int32_t row) const;
  void keep(int32_t row, const std::string& name, std::vector<BlockId> ids);
  void note_onboards(int32_t row) const;

  RowContext c_;
  int64_t hash_block_size_;
  const Clock* clock_;
  int64_t num_releases_ = 0;
  bool has_forgotten_ = false;
};

}  // namespace kvcache
