// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_table.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace kvcache {

std::vector<int32_t> RowTable::in_use() const {
  std::vector<int32_t> rows;
  for (int32_t row = 0; row < size(); ++row) {
    if (is_in_use(row)) rows.push_back(row);
  }
  return rows;
}

int32_t RowTable::take() {
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

void RowTable::give_up(int32_t row) {
  rows_[row] = Row{};
  disturb(row);
  free_.push(row);
  --num_in_use_;
}

int64_t RowTable::next_quiet_until(int32_t row) const {
  const Row& r = rows_[row];
  if (r.has_forked() || r.state != RowState::kRunning || r.num_drafts > 0) return 0;
  int64_t until = kUnbounded;
  const RowBlocks* held = blocks(row);
  for (const CacheGroup& group : *groups_) {
    until = std::min(until, group.rules->quiet_until(group, held[group.id], r.num_computed));
  }
  return until;
}

std::vector<BlockId> RowTable::written_blocks(int32_t row) const {
  std::vector<BlockId> out;
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held(row, group);
    const PageRules::Columns columns = computed(row, group);
    const auto first = each.blocks.begin() + columns.first;
    out.insert(out.end(), first, std::max(first, each.blocks.begin() + columns.stop));
  }
  return out;
}

namespace {

// The blocks of a group that were not yet taken by a round (see `tail_first`).
struct Tail {
  const BlockId* ids;
  int64_t num_left;
  int64_t block_size;
  int64_t first_token;  // first token of the last remaining block
};

}  // namespace

std::vector<BlockId> RowTable::tail_first(int32_t row, bool with_all) const {
  const RowBlocks* held = blocks(row);
  if (num_groups_ == 1 && groups_->front().rules->traits.follows_sequence) {
    return {held->blocks.rbegin(), held->blocks.rend() - held->num_dropped};
  }
  std::vector<BlockId> out;
  std::array<Tail, kMaxGroups> tails;  // in group order
  size_t num_tails = 0, num_blocks = 0;
  int64_t last = 0, unit = 0;  // tokens: where the last block begins, and where blocks may begin
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    if (!group.rules->traits.follows_sequence) {
      if (with_all) out.insert(out.end(), each.blocks.rbegin(), each.blocks.rend());
    } else if (each.num_alive() > 0) {
      const int64_t first_token = (each.size() - 1) * group.block_size;
      tails[num_tails++] = {each.blocks.data() + each.num_dropped, each.num_alive(),
                            group.block_size, first_token};
      num_blocks += static_cast<size_t>(each.num_alive());
      last = std::max(last, first_token);
      unit = std::gcd(unit, group.block_size);
    }
  }
  num_blocks += out.size();
  out.reserve(num_blocks);
  // Each round takes the blocks that begin at one token.
  for (int64_t token = last; out.size() < num_blocks; token -= unit) {
    for (size_t i = 0; i < num_tails; ++i) {
      Tail& tail = tails[i];
      if (tail.first_token != token || tail.num_left == 0) continue;
      out.push_back(tail.ids[--tail.num_left]);
      tail.first_token -= tail.block_size;
    }
  }
  return out;
}

void RowTable::check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const {
  int64_t num_in_use = 0;
  for (int32_t row = 0; row < size(); ++row) {
    num_in_use += is_in_use(row);
    require(quiet_until(row) <= (is_in_use(row) ? next_quiet_until(row) : 0), "row ", row,
            " would miss a change of its blocks");
    for (const CacheGroup& group : *groups_) {
      const RowBlocks& each = held(row, group);
      require(!group.rules->traits.updates_in_place ||
                  rows_[row].num_drafts < std::max<int64_t>(each.num_alive(), 1),
              "row ", row, " has a draft without a page");
      for (int64_t b = 0; b < each.size(); ++b) {
        require((each[b] == kNullBlock) == (b < each.num_dropped), "row ", row,
                " has null blocks that num_dropped does not count");
        if (each[b] != kNullBlock) ++(*(rows_[row].is_on_host() ? host : device))[each[b]];
      }
    }
  }
  require(num_in_use == num_in_use_, "num_in_use is not the number of rows in use");
  require(num_in_use + static_cast<int64_t>(free_.size()) == size(),
          "a row is neither in use nor free");
}

}  // namespace kvcache
