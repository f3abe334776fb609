// SPDX-License-Identifier: Apache-2.0
// The rows that requests use, the blocks of each row in each group, and the free rows.
//
// Invariants: the count of rows in use is exact. A row's blocks are null in the columns below
// num_dropped, and only there. A row holds references on the device or, after it was swapped out,
// on the host. Serving a row up to its `quiet_until` changes no block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/groups/cache_group.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"
#include "core/hashing/token_chain.h"
#include "core/pool/per_block.h"

namespace kvcache {

struct Row {
  std::shared_ptr<TokenChain> chain;  // null: the row is not in use
  int64_t num_computed = 0;           // tokens with a slot; they have KV after the plans have run
  int64_t start = 0;                  // num_computed before the row was last served
  // The number of computed tokens below which the row has nothing to publish.
  int64_t next_publish = kUnbounded;
  int64_t admission = 0;  // number of the admission that created the row
  uint32_t stamp = 0;     // stamp of the last call that named the row
  // For groups of states: number of computed tokens of the last step that may be rejected. The
  // state after all computed tokens is in the page num_drafts columns after the first page of the
  // row.
  int32_t num_drafts = 0;
  int32_t num_known = 0;             // known tokens when the row was last served
  int32_t num_undecided_before = 0;  // tokens before `start` that could be rejected at that time
  bool by_step = false;              // admitted by `step`
  bool reads = false;                // the row takes hits when it is restarted
  bool is_stale = false;             // holds KV of an earlier epoch, so it publishes nothing
  bool has_forked = false;           // shares blocks that are not full, or has shared some
  bool may_share = false;            // may share blocks that it writes next
  bool on_host = false;              // its blocks are host pages
  bool is_receiving = false;         // the KV of its external tokens has not arrived
  bool waits_for_marks = false;      // blocks are published by `mark_computed`; see NewRow

  // Returns how many of the first `stop` tokens, after which the row continues, may still be
  // rejected. Unless they are all known (`num_ids`: new known tokens), this is the number of drafts
  // of the last step, because the rejections so far may belong to the step before it.
  int64_t num_undecided(int64_t stop, int64_t num_ids = 0) const {
    const int64_t num_drafted = num_computed - std::max<int64_t>(start + 1, num_known);
    if (num_drafted <= 0 || chain->num_tokens() + num_ids >= stop) return 0;
    return std::min(num_drafted, stop);
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
  RetainedEnds retained{};  // ends of hits for which its blocks stay cached
};

class RowTable {
 public:
  // `max_rows`: 0 means unlimited.
  RowTable(const std::vector<CacheGroup>* groups, int64_t max_rows)
      : groups_(groups), num_groups_(groups->size()), max_rows_(max_rows) {}

  int32_t size() const { return static_cast<int32_t>(rows_.size()); }  // including free rows
  int64_t num_in_use() const { return num_in_use_; }
  bool is_in_use(int32_t row) const { return rows_[row].chain != nullptr; }
  // Whether the row still belongs to this admission.
  bool is_still(int32_t row, int64_t admission) const {
    return is_in_use(row) && rows_[row].admission == admission;
  }

  // Returns the row. `row` may be any number; throws std::invalid_argument if no row with this
  // number is in use.
  const Row& at(int32_t row) const {
    if (row < 0 || row >= size() || !is_in_use(row)) fail_not_in_use(row);
    return rows_[row];
  }
  Row& operator[](int32_t row) { return rows_[row]; }
  const Row& operator[](int32_t row) const { return rows_[row]; }
  AdmissionInfo& info(int32_t row) { return info_[row]; }
  const AdmissionInfo& info(int32_t row) const { return info_[row]; }
  // The number of tokens, including lookahead, up to which serving the row changes no block; 0 if
  // unknown. It is set when the row is served. `disturb` resets it when the blocks of the row
  // change by other means.
  int64_t quiet_until(int32_t row) const { return quiet_until_[static_cast<size_t>(row)]; }
  const std::vector<int64_t>& quiet_until() const { return quiet_until_; }  // by row
  void set_quiet_until(int32_t row, int64_t num_tokens) {
    quiet_until_[static_cast<size_t>(row)] = num_tokens;
  }
  void disturb(int32_t row) { set_quiet_until(row, 0); }
  // Recomputes `quiet_until` with the page rules. It is 0 for a row that shares blocks, receives or
  // is on the host.
  int64_t next_quiet_until(int32_t row) const;

  RowBlocks* blocks(int32_t row) { return &blocks_[first_of(row)]; }  // indexed by group
  const RowBlocks* blocks(int32_t row) const { return &blocks_[first_of(row)]; }

  bool has_free() const {
    return !free_.empty() || max_rows_ == 0 || static_cast<int64_t>(rows_.size()) < max_rows_;
  }
  // Takes the lowest-numbered free row, with a new admission number and without blocks. There must
  // be a free row.
  int32_t take();
  // Frees the row, which has released its blocks.
  void give_up(int32_t row);

  // `begin_call` starts a call. `name` returns whether the call names the row for the first time.
  void begin_call() { ++call_stamp_; }
  bool name(int32_t row) {
    const bool is_first = rows_[row].stamp != call_stamp_;
    rows_[row].stamp = call_stamp_;
    return is_first;
  }

  // See PageRules.
  int64_t first_token(int32_t row, const CacheGroup& group, int64_t column) const {
    return group.rules->first_token(group, blocks(row)[group.id], rows_[row].num_computed, column);
  }

  int64_t num_written(int32_t row, const CacheGroup& group) const;
  PageRules::Columns computed(int32_t row, const CacheGroup& group) const;
  // Returns the blocks of all groups that contain KV, without null blocks.
  std::vector<BlockId> written_blocks(int32_t row) const;
  // Returns all blocks of the row. Blocks later in the sequence come first, because tails are
  // evicted before heads in all groups. With `with_all`, blocks that do not follow the sequence
  // come before all others. Otherwise, they are omitted.
  std::vector<BlockId> tail_first(int32_t row, bool with_all) const;

  // Adds the references that rows hold on the device and on the host. Throws std::logic_error.
  void check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const;

 private:
  [[noreturn]] static void fail_not_in_use(int32_t row);
  size_t first_of(int32_t row) const { return static_cast<size_t>(row) * num_groups_; }

  const std::vector<CacheGroup>* groups_;
  size_t num_groups_;
  int64_t max_rows_;
  std::vector<Row> rows_;
  std::vector<AdmissionInfo> info_;  // by row
  std::vector<RowBlocks> blocks_;    // [rows, groups]
  std::vector<int64_t> quiet_until_;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> free_;
  int64_t num_in_use_ = 0;
  int64_t num_admissions_ = 0;
  uint32_t call_stamp_ = 0;
};

}  // namespace kvcache
