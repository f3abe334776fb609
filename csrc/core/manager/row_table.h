// SPDX-License-Identifier: Apache-2.0
// The rows that requests use, the blocks of each row in each group, and the free rows.
//
// Invariants: the count of rows in use is exact. A row's blocks are null in the columns below
// num_dropped, and only there. A row holds references on the device or, after it was swapped out,
// on the host. Serving a row up to its `quiet_until` changes no block.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/groups/row.h"
#include "core/groups/row_blocks.h"
#include "core/groups/rules/page_rules.h"
#include "core/pool/per_block.h"

namespace kvcache {

class RowTable {
 public:
  // `max_rows`: 0 means unlimited.
  RowTable(const std::vector<CacheGroup>* groups, int64_t max_rows)
      : groups_(groups), num_groups_(groups->size()), max_rows_(max_rows) {}

  int32_t size() const { return static_cast<int32_t>(rows_.size()); }  // including free rows
  int64_t num_in_use() const { return num_in_use_; }
  bool is_in_use(int32_t row) const { return rows_[row].chain != nullptr; }
  // In ascending order.
  std::vector<int32_t> in_use() const {
    std::vector<int32_t> rows;
    for (int32_t row = 0; row < size(); ++row) {
      if (is_in_use(row)) rows.push_back(row);
    }
    return rows;
  }
  // Whether the row still belongs to this admission.
  bool is_still(int32_t row, int64_t admission) const {
    return is_in_use(row) && rows_[row].admission == admission;
  }

  // Returns the row. `row` may be any number; throws std::invalid_argument if no row with this
  // number is in use.
  const Row& at(int32_t row) const {
    // A negative number is larger than any size.
    if (static_cast<size_t>(row) < rows_.size() && is_in_use(row)) return rows_[row];
    throw_invalid("row ", row, " is not in use");
  }
  Row& operator[](int32_t row) { return rows_[row]; }
  const Row& operator[](int32_t row) const { return rows_[row]; }
  AdmissionInfo& info(int32_t row) { return info_[row]; }
  const AdmissionInfo& info(int32_t row) const { return info_[row]; }
  // The number of tokens, including lookahead, up to which serving the row changes no block; 0 if
  // unknown. Set when the row is served, and reset (`disturb`) when its blocks change otherwise.
  int64_t quiet_until(int32_t row) const { return quiet_until_[static_cast<size_t>(row)]; }
  const std::vector<int64_t>& quiet_until() const { return quiet_until_; }  // by row
  void set_quiet_until(int32_t row, int64_t num_tokens) {
    quiet_until_[static_cast<size_t>(row)] = num_tokens;
  }
  void disturb(int32_t row) { set_quiet_until(row, 0); }
  // Recomputes `quiet_until` with the page rules. It is 0 for a row that shares blocks, receives or
  // is on the host.
  int64_t next_quiet_until(int32_t row) const {
    const Row& r = rows_[row];
    if (r.has_forked() || r.state != RowState::kRunning || r.num_drafts > 0) return 0;
    int64_t until = kUnbounded;
    const RowBlocks* held_by_group = blocks(row);
    for (const CacheGroup& group : *groups_) {
      until =
          std::min(until, group.rules->quiet_until(group, held_by_group[group.id], r.num_computed));
    }
    return until;
  }

  RowBlocks* blocks(int32_t row) { return &blocks_[first_of(row)]; }  // indexed by group
  const RowBlocks* blocks(int32_t row) const { return &blocks_[first_of(row)]; }

  RowBlocks& held(int32_t row, const CacheGroup& group) { return blocks(row)[group.id]; }
  const RowBlocks& held(int32_t row, const CacheGroup& group) const {
    return blocks(row)[group.id];
  }

  bool has_free() const {
    return !free_.empty() || max_rows_ == 0 || static_cast<int64_t>(rows_.size()) < max_rows_;
  }
  // Takes the lowest-numbered free row, with a new admission number and without blocks. There must
  // be a free row.
  int32_t take() {
    ++num_in_use_;
    int32_t row = size();
    if (free_.empty()) {
      rows_.emplace_back();
      info_.emplace_back();
      quiet_until_.push_back(0);
      blocks_.resize(blocks_.size() + num_groups_);
    } else {
      row = free_.top();
      free_.pop();
    }
    rows_[row].admission = ++num_admissions_;
    return row;
  }
  // Frees the row, which has released its blocks.
  void give_up(int32_t row) {
    rows_[row] = Row{};
    disturb(row);
    free_.push(row);
    --num_in_use_;
  }

  // `begin_call` starts a call. `name` returns whether the call names the row for the first time.
  void begin_call() { ++call_stamp_; }
  bool name(int32_t row) { return std::exchange(rows_[row].stamp, call_stamp_) != call_stamp_; }

  // See PageRules.
  int64_t first_token(int32_t row, const CacheGroup& group, int64_t column) const {
    return group.rules->first_token(group, blocks(row)[group.id], rows_[row].num_computed, column);
  }

  int64_t num_written(int32_t row, const CacheGroup& group) const {
    return group.rules->num_written(group, held(row, group), rows_[row].num_computed);
  }
  PageRules::Columns computed(int32_t row, const CacheGroup& group) const {
    const RowBlocks& held = this->held(row, group);
    const int64_t size = rows_[row].is_on_host() ? held.size() : num_written(row, group);
    return group.rules->computed(held, size, rows_[row].num_drafts);
  }
  // Returns the blocks of all groups that contain KV, without null blocks.
  std::vector<BlockId> written_blocks(int32_t row) const {
    std::vector<BlockId> out;
    for (const CacheGroup& group : *groups_) {
      const RowBlocks& held = this->held(row, group);
      const PageRules::Columns columns = computed(row, group);
      const auto first = held.blocks.begin() + columns.first;
      out.insert(out.end(), first, std::max(first, held.blocks.begin() + columns.stop));
    }
    return out;
  }
  // Returns all blocks of the row. Blocks later in the sequence come first, so that tails are
  // evicted before heads. With `with_all`, blocks that do not follow the sequence come before all
  // others.
  std::vector<BlockId> tail_first(int32_t row, bool with_all) const {
    const RowBlocks* held_by_group = blocks(row);
    if (num_groups_ == 1 && groups_->front().rules->traits.follows_sequence) {
      return {held_by_group->blocks.rbegin(),
              held_by_group->blocks.rend() - held_by_group->num_dropped};
    }
    std::vector<BlockId> out;
    if (with_all) add_unordered(held_by_group, &out);
    add_by_position(held_by_group, &out);
    return out;
  }

  // Adds the references that rows hold on the device and on the host. Throws std::logic_error.
  void check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const {
    int64_t num_in_use = 0;
    for (int32_t row = 0; row < size(); ++row) {
      num_in_use += is_in_use(row);
      require(quiet_until(row) <= (is_in_use(row) ? next_quiet_until(row) : 0), "row ", row,
              " would miss a change of its blocks");
      for (const CacheGroup& group : *groups_) {
        const RowBlocks& held = this->held(row, group);
        require(!group.rules->traits.updates_in_place ||
                    rows_[row].num_drafts < std::max<int64_t>(held.num_alive(), 1),
                "row ", row, " has a draft without a page");
        for (int64_t b = 0; b < held.size(); ++b) {
          require((held[b] == kNullBlock) == (b < held.num_dropped), "row ", row,
                  " has null blocks that num_dropped does not count");
          if (held[b] != kNullBlock) ++(*(rows_[row].is_on_host() ? host : device))[held[b]];
        }
      }
    }
    require(num_in_use == num_in_use_, "num_in_use is not the number of rows in use");
    require(num_in_use + static_cast<int64_t>(free_.size()) == size(),
            "a row is neither in use nor free");
  }

 private:
  // Parts of `tail_first`: add the blocks of groups that do not follow the sequence, and of groups
  // that do.
  void add_unordered(const RowBlocks* held_by_group, std::vector<BlockId>* out) const {
    for (const CacheGroup& group : *groups_) {
      if (group.rules->traits.follows_sequence) continue;
      const std::vector<BlockId>& all = held_by_group[group.id].blocks;
      out->insert(out->end(), all.rbegin(), all.rend());
    }
  }
  void add_by_position(const RowBlocks* held_by_group, std::vector<BlockId>* out) const {
    std::array<int64_t, kMaxGroups> num_left{};  // blocks that no round has taken yet, by group
    int64_t last = 0, unit = 0;  // tokens: where the last block begins, and where blocks may begin
    size_t num = out->size(), num_alive = 0;
    for (const CacheGroup& group : *groups_) {
      if (!group.rules->traits.follows_sequence) continue;
      const RowBlocks& held = held_by_group[group.id];
      num_left[group.id] = held.size();
      num_alive += static_cast<size_t>(held.num_alive());
      last = std::max(last, (held.size() - 1) * group.block_size);
      unit = std::gcd(unit, group.block_size);
    }
    out->resize(num + num_alive);
    // Each round takes the blocks that begin at one token. All blocks begin at multiples of the
    // greatest common divisor of the block sizes, so these rounds reach each of them.
    for (int64_t token = last; num < out->size(); token -= unit) {
      for (const CacheGroup& group : *groups_) {
        const RowBlocks& held = held_by_group[group.id];
        const int64_t column = num_left[group.id] - 1;
        if (column < held.num_dropped || column * group.block_size != token) continue;
        (*out)[num++] = held[column];
        num_left[group.id] = column;
      }
    }
  }
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
