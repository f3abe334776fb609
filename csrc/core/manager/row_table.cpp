// SPDX-License-Identifier: Apache-2.0
#include "core/manager/row_table.h"

#include <array>

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

int64_t RowTable::num_written(int32_t row, const CacheGroup& group) const {
  return group.rules->num_written(group, held(row, group), rows_[row].num_computed);
}

PageRules::Columns RowTable::computed(int32_t row, const CacheGroup& group) const {
  const RowBlocks& each = held(row, group);
  const int64_t size = rows_[row].is_on_host() ? each.size() : num_written(row, group);
  return group.rules->computed(each, size, rows_[row].num_drafts);
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

// The blocks of a group that `merge_tails` has not taken yet.
struct Tail {
  Tail() = default;
  Tail(const RowBlocks& each, int64_t tokens)
      : ids(each.blocks.data() + each.num_dropped),
        num_left(each.num_alive()),
        block_size(tokens),
        first_token((each.size() - 1) * tokens) {}

  BlockId take_last() {
    first_token -= block_size;
    return ids[--num_left];
  }

  const BlockId* ids;
  int64_t num_left, block_size;
  int64_t first_token;  // first token of the last remaining block
};

// Returns how many rounds each take a block of every tail, or 1. The next round takes the blocks
// that begin at token `last`.
int64_t num_equal_rounds(const Tail* tails, size_t n, int64_t last) {
  int64_t num_rounds = tails[0].num_left;
  for (size_t i = 0; i < n; ++i) {
    const bool is_like_first =
        tails[i].first_token == last && tails[i].block_size == tails[0].block_size;
    num_rounds = std::min(num_rounds, is_like_first ? tails[i].num_left : int64_t{1});
  }
  return num_rounds;
}

// Each round takes at most one block per tail: the blocks with the largest first token. Rounds that
// take a block of every tail are combined.
void merge_tails(Tail* tails, size_t n, BlockId* out) {
  while (n > 0) {
    int64_t last = 0;
    for (size_t i = 0; i < n; ++i) last = std::max(last, tails[i].first_token);
    const int64_t num_rounds = num_equal_rounds(tails, n, last);
    for (int64_t round = 0; round < num_rounds; ++round, last -= tails[0].block_size) {
      for (size_t i = 0; i < n; ++i) {
        if (tails[i].first_token == last) *out++ = tails[i].take_last();
      }
    }
    const auto is_empty = [](const Tail& tail) { return tail.num_left == 0; };
    n = static_cast<size_t>(std::remove_if(tails, tails + n, is_empty) - tails);
  }
}

}  // namespace

std::vector<BlockId> RowTable::tail_first(int32_t row, bool with_all) const {
  const RowBlocks* held = blocks(row);
  if (num_groups_ == 1 && groups_->front().rules->traits.follows_sequence) {
    return {held->blocks.rbegin(), held->blocks.rend() - held->num_dropped};
  }
  std::array<Tail, kMaxGroups> tails;  // in group order, without groups that hold no blocks
  size_t num_tails = 0, num_alive = 0;
  std::vector<BlockId> out;
  for (const CacheGroup& group : *groups_) {
    const RowBlocks& each = held[group.id];
    if (!group.rules->traits.follows_sequence) {
      if (with_all) out.insert(out.end(), each.blocks.rbegin(), each.blocks.rend());
    } else if (each.num_alive() > 0) {
      tails[num_tails++] = Tail(each, group.block_size);
      num_alive += static_cast<size_t>(each.num_alive());
    }
  }
  const size_t num_others = out.size();
  out.resize(num_others + num_alive);
  merge_tails(tails.data(), num_tails, out.data() + num_others);
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
