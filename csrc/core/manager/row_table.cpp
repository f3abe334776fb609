// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_table.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace kvcache {

void RowTable::fail_not_in_use(int32_t row) {
  throw std::invalid_argument("row " + std::to_string(row) + " is not in use");
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

int64_t RowTable::num_written(int32_t row, const CacheGroup& group) const {
  return group.rules->num_written(group, blocks(row)[group.id], rows_[row].num_computed);
}

PageRules::Columns RowTable::computed(int32_t row, const CacheGroup& group) const {
  const RowBlocks& each = blocks(row)[group.id];
  const int64_t size = rows_[row].is_on_host() ? each.size() : num_written(row, group);
  return group.rules->computed(each, size, rows_[row].num_drafts);
}

std::vector<BlockId> RowTable::written_blocks(int32_t row) const {
  std::vector<BlockId> out;
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = blocks(row)[group.id];
    const PageRules::Columns columns = computed(row, group);
    const auto first = each.blocks.begin() + columns.first;
    out.insert(out.end(), first, std::max(first, each.blocks.begin() + columns.stop));
  }
  return out;
}

std::vector<BlockId> RowTable::tail_first(int32_t row, bool with_all) const {
  const RowBlocks* held = blocks(row);
  if (num_groups_ == 1 && groups_->front().rules->traits.follows_sequence) {
    return {held->blocks.rbegin(), held->blocks.rend() - held->num_dropped};
  }
  struct Tail {
    const BlockId* ids;
    int64_t left, num_dropped, block_size;
    int64_t first_token;  // first token of the last remaining block
  };
  std::array<Tail, kMaxGroups> tails;  // in group order, without groups that hold no blocks
  size_t num_tails = 0, num_alive = 0;
  std::vector<BlockId> out;
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    if (!group.rules->traits.follows_sequence) {
      if (with_all) out.insert(out.end(), each.blocks.rbegin(), each.blocks.rend());
    } else if (each.size() > each.num_dropped) {
      tails[num_tails++] = {each.blocks.data(), each.size(), each.num_dropped, group.block_size,
                            (each.size() - 1) * group.block_size};
      num_alive += static_cast<size_t>(each.num_alive());
    }
  }
  const size_t num_others = out.size();
  out.resize(num_others + num_alive);
  // Each round takes at most one block per group: the blocks with the largest first token. If every
  // remaining group has such a block and all block sizes are equal, many rounds are combined.
  for (BlockId* next = out.data() + num_others; num_tails > 0;) {
    int64_t last = 0;
    for (size_t i = 0; i < num_tails; ++i) last = std::max(last, tails[i].first_token);
    int64_t num_rounds = tails[0].left - tails[0].num_dropped;
    for (size_t i = 0; i < num_tails; ++i) {
      const bool is_like_first =
          tails[i].first_token == last && tails[i].block_size == tails[0].block_size;
      num_rounds =
          std::min(num_rounds, is_like_first ? tails[i].left - tails[i].num_dropped : int64_t{1});
    }
    for (int64_t round = 0; round < num_rounds; ++round, last -= tails[0].block_size) {
      for (size_t i = 0; i < num_tails; ++i) {
        if (tails[i].first_token != last) continue;
        *next++ = tails[i].ids[--tails[i].left];
        tails[i].first_token -= tails[i].block_size;
      }
    }
    num_tails = std::remove_if(tails.begin(), tails.begin() + num_tails,
                               [](const Tail& tail) { return tail.left == tail.num_dropped; }) -
                tails.begin();
  }
  return out;
}

void RowTable::check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const {
  int64_t num_in_use = 0;
  for (int32_t row = 0; row < size(); ++row) {
    num_in_use += is_in_use(row);
    if (quiet_until(row) > (is_in_use(row) ? next_quiet_until(row) : 0)) {
      throw std::logic_error("row " + std::to_string(row) + " would miss a change of its blocks");
    }
    for (const CacheGroup& group : *groups_) {
      const RowBlocks& each = blocks(row)[group.id];
      if (group.rules->traits.updates_in_place &&
          rows_[row].num_drafts >= std::max<int64_t>(each.num_alive(), 1)) {
        throw std::logic_error("row " + std::to_string(row) + " has a draft without a page");
      }
      for (int64_t b = 0; b < each.size(); ++b) {
        if ((each[b] == kNullBlock) != (b < each.num_dropped)) {
          throw std::logic_error("row " + std::to_string(row) +
                                 " has null blocks that num_dropped does not count");
        }
        if (each[b] != kNullBlock) ++(*(rows_[row].is_on_host() ? host : device))[each[b]];
      }
    }
  }
  if (num_in_use != num_in_use_)
    throw std::logic_error("num_in_use is not the number of rows in use");
  if (num_in_use + static_cast<int64_t>(free_.size()) != size()) {
    throw std::logic_error("a row is neither in use nor free");
  }
}

}  // namespace kvcache
