// SPDX-License-Identifier: Apache-2.0
// The record of one row: its request, and how far it has been computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/pool/block_listener.h"

namespace kvcache {

// The calls that serve a row.
enum class ServedBy : uint8_t {
  kSteps,        // `step`, whose plans contain the row
  kCalls,        // calls for single rows, from a caller that maintains its own tables
  kMarkedCalls,  // likewise; blocks are published by `mark_computed` (see NewRow)
};

enum class RowState : uint8_t {
  kRunning,
  kReceiving,  // the KV of its external tokens has not arrived
  kOnHost,     // its blocks are host pages
};

// Whether other rows may hold blocks of a row that are not full.
enum class Sharing : uint8_t {
  kNone,     // the row has never forked
  kEarlier,  // none of the blocks that the row writes next
  kNext,     // also the blocks that it writes next, which are then replaced
};

// A step reads most of this record for every row, so it is one cache line.
struct alignas(64) Row {
  std::shared_ptr<TokenChain> chain;  // null: the row is not in use
  int64_t num_computed = 0;           // tokens with a slot; they have KV after the plans have run
  // The number of computed tokens below which the row has nothing to publish.
  int64_t next_publish = kUnbounded;
  int64_t admission = 0;  // number of the admission that created the row
  uint32_t stamp = 0;     // stamp of the last call that named the row
  int32_t start = 0;      // num_computed before the row was last served
  // For groups of states: number of computed tokens of the last step that may be rejected. The
  // state after all computed tokens is in the page num_drafts columns after the first page of the
  // row.
  int32_t num_drafts = 0;
  int32_t num_known = 0;             // known tokens when the row was last served
  int32_t num_undecided_before = 0;  // tokens before `start` that could be rejected at that time
  ServedBy served_by = ServedBy::kCalls;
  RowState state = RowState::kRunning;
  Sharing sharing = Sharing::kNone;
  bool is_stale = false;  // holds KV of an earlier epoch, so it publishes nothing

  bool by_step() const { return served_by == ServedBy::kSteps; }
  bool waits_for_marks() const { return served_by == ServedBy::kMarkedCalls; }
  bool is_receiving() const { return state == RowState::kReceiving; }
  bool is_on_host() const { return state == RowState::kOnHost; }
  bool has_forked() const { return sharing != Sharing::kNone; }
  bool may_share() const { return sharing == Sharing::kNext; }
  // Called when the KV of the row has become outdated.
  void stop_publishing() {
    is_stale = true;
    next_publish = kUnbounded;
  }
  // Called when the row may continue in any of its blocks.
  void expect_shared() {
    if (has_forked()) sharing = Sharing::kNext;
  }

  // Returns how many of the first `stop` tokens, after which the row continues, may still be
  // rejected. Unless they are all known (`num_ids`: new known tokens), this is the number of drafts
  // of the last step, because the rejections so far may belong to the step before it, but no token
  // up to the first one of the last step, which is certain.
  int64_t num_undecided(int64_t stop, int64_t num_ids = 0) const {
    const int64_t num_drafted = num_computed - std::max<int64_t>(int64_t{start} + 1, num_known);
    if (num_drafted <= 0 || chain->num_tokens() + num_ids >= stop) return 0;
    const int64_t num_certain = int64_t{start} - num_undecided_before + 1;
    return std::clamp<int64_t>(stop - num_certain, 0, num_drafted);
  }
  // Removes the last n computed tokens, which were rejected drafts.
  void take_back(int64_t n) {
    num_computed -= n;
    num_drafts = static_cast<int32_t>(num_drafts_after(n));
  }
  int64_t num_drafts_after(int64_t num_rejected) const {
    return num_drafts == 0 ? 0 : num_drafts - num_rejected;
  }
};
static_assert(sizeof(Row) == 64);

struct AdmissionInfo {     // data of the admission that is needed later
  int64_t num_prompt = 0;  // known tokens at admission
  int64_t num_hit = 0;     // tokens of the hit; updated when the row is restarted
  int64_t num_marked = 0;  // tokens marked as computed
  // The number of prompt tokens that the groups that keep all tokens would hit, regardless of
  // windows and states.
  int64_t num_shared = 0;
  Access access;                   // last access that is not yet recorded for the row's blocks
  int64_t num_valid = kUnbounded;  // maximum number of valid tokens while the row receives
  int64_t num_slots = 0;           // slots allocated so far, which may have been written
  int64_t hit_end = 0;  // end of the hit; tokens before it are held only if later tokens read them
  int64_t step = -1;    // step that admitted the row, or -1 if it was admitted outside of steps
  // Whether this step was aborted while the row received, so that it may not have cleared the
  // pages.
  bool was_aborted = false;
  bool reads = false;       // whether the row takes hits when it is restarted
  RetainedEnds retained{};  // ends of hits for which its blocks stay cached
};

}  // namespace kvcache
