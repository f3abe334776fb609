// The rows of requests, their blocks per group, and the rows that are free.
//
// Invariant: the number of rows in use is counted; a row's blocks are null exactly below
// num_dropped; what a row refers to is its blocks, on the device or, once it is swapped out, on the
// host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/row_blocks.h"
#include "core/pool/per_block.h"

namespace kvcache {

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

struct Row {
  std::shared_ptr<TokenChain> chain;  // null: the row is not in use
  int64_t num_computed = 0;           // tokens with a slot and, once the plans ran, with KV in it
  int64_t start = 0;                  // num_computed before the row was last served
  int64_t next_publish = kUnbounded;  // with fewer computed tokens there is nothing to publish
  int64_t admission = 0;              // how many rows had been admitted when it was
  uint32_t stamp = 0;                 // of the last call that named it
  // Groups of states: computed tokens of the last step that may be rejected. The state after all
  // computed tokens is in the page so many behind the first that the row holds.
  int32_t num_drafts = 0;
  bool by_step = false;       // admitted by `step`
  bool reads = false;         // takes hits where it starts anew
  bool is_stale = false;      // holds KV of an earlier epoch: publishes nothing
  bool has_forked = false;    // shares blocks that are not full, or did
  bool may_share = false;     // of those that it writes next
  bool on_host = false;       // its blocks are pages of the host
  bool is_receiving = false;  // KV of its tokens behind the hit is still to come

  // The last n computed tokens were drafts that are rejected.
  void take_back(int64_t n) {
    num_computed -= n;
    num_drafts = static_cast<int32_t>(num_drafts_after(n));
  }
  int64_t num_drafts_after(int64_t num_rejected) const {
    return num_drafts == 0 ? 0 : num_drafts - num_rejected;
  }
};

struct AdmissionInfo {     // for those who ask later
  int64_t num_prompt = 0;  // tokens known when it was admitted
  int64_t num_hit = 0;     // of these; a restart counts anew
  int64_t num_marked = 0;  // tokens that were marked as computed
  int64_t num_shared = 0;  // of the prompt: what groups of tokens would have hit, with any states
  Access access;           // the last one, which its blocks have not been said to have had
  int64_t num_valid = kUnbounded;  // while it receives: tokens that are valid at most
  int64_t num_slots = 0;           // slots up to here were given, and may have been written
  int64_t hit_end = 0;  // of the tokens before it, the blocks hold those that are read behind it
};

class RowTable {
 public:
  // `max_rows` 0: as many as needed.
  RowTable(const std::vector<CacheGroup>* groups, int64_t max_rows)
      : groups_(groups), num_groups_(groups->size()), max_rows_(max_rows) {}

  int32_t size() const { return static_cast<int32_t>(rows_.size()); }  // in use or not
  int64_t num_in_use() const { return num_in_use_; }
  bool is_in_use(int32_t row) const { return rows_[row].chain != nullptr; }
  // Whether the row is still that of this admission.
  bool is_still(int32_t row, int64_t admission) const {
    return is_in_use(row) && rows_[row].admission == admission;
  }

  // Throws std::invalid_argument where the row is not in use. Any number may be asked.
  const Row& at(int32_t row) const {
    if (row < 0 || row >= size() || !is_in_use(row)) fail_not_in_use(row);
    return rows_[row];
  }
  Row& operator[](int32_t row) { return rows_[row]; }
  const Row& operator[](int32_t row) const { return rows_[row]; }
  AdmissionInfo& info(int32_t row) { return info_[row]; }
  const AdmissionInfo& info(int32_t row) const { return info_[row]; }
  RowBlocks* blocks(int32_t row) { return &blocks_[first_of(row)]; }  // by group
  const RowBlocks* blocks(int32_t row) const { return &blocks_[first_of(row)]; }

  bool has_free() const {
    return !free_.empty() || max_rows_ == 0 || static_cast<int64_t>(rows_.size()) < max_rows_;
  }
  // The smallest free row, with a new admission number and without blocks; there must be one.
  int32_t take();
  // The row has released its blocks.
  void give_up(int32_t row);

  // Rows that a call names: it begins, and each is named for the first time or not.
  void begin_call() { ++call_stamp_; }
  bool name(int32_t row) {
    const bool is_first = rows_[row].stamp != call_stamp_;
    rows_[row].stamp = call_stamp_;
    return is_first;
  }

  // Of the row's tokens, the first that the block in this column has a part in: where its content
  // is invalid, so are that token and those behind it. A state has a part in all tokens since it
  // came into its page, and in what comes next: a row without it does not go on where it is.
  int64_t first_token(int32_t row, const CacheGroup& group, int64_t column) const {
    if (group.holds_encoder()) return 0;
    if (!group.holds_state()) return column * group.block_size;
    return std::min<int64_t>(blocks(row)[group.id].state_start, rows_[row].num_computed - 1);
  }

  // Blocks of the row with KV in them, dropped ones counted; the others are lookahead.
  int64_t num_written(int32_t row, const CacheGroup& group) const;
  std::vector<BlockId> written_blocks(int32_t row) const;  // of all groups; no null ones
  // All its blocks. Tails are evicted before heads, in all groups alike: what lies further back in
  // the sequence comes first, but for what an encoder computed.
  std::vector<BlockId> tail_first(int32_t row, bool with_encoder) const;

  // Adds what rows hold to the references, of the device and of the host. Throws std::logic_error.
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
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> free_;
  int64_t num_in_use_ = 0;
  int64_t num_admissions_ = 0;
  uint32_t call_stamp_ = 0;
};

}  // namespace kvcache
