// Rows that leave the device for the host, and come back.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/manager/manager.h"

namespace kvcache {

void Manager::check_has_host(const char* what) const {
  if (host_ != nullptr) return;
  throw std::invalid_argument(std::string(what) +
                              ", but there is no host tier: expected num_host_blocks of 2 or more");
}

void Manager::check_on_device(int32_t row) const {
  if (!rows_.at(row).on_host) return;
  throw std::invalid_argument("row " + std::to_string(row) +
                              " is swapped out: expected one on the device");
}

void Manager::check_swap(const std::vector<int32_t>& rows, bool on_host) {
  rows_.begin_call();
  for (int32_t row : rows) {
    check_driver(row, /*by_step=*/false);
    if (rows_[row].on_host != on_host) {
      throw std::invalid_argument("row " + std::to_string(row) +
                                  (on_host ? " is on the device: expected one that is swapped out"
                                           : " is swapped out: expected one on the device"));
    }
    if (!rows_.name(row)) {
      throw std::invalid_argument("rows names row " + std::to_string(row) + " twice");
    }
  }
}

int64_t Manager::num_unique_blocks(const std::vector<int32_t>& rows) const {
  check_reader();
  for (int32_t row : rows) rows_.at(row);
  return count_unique(rows);
}

int64_t Manager::count_unique(const std::vector<int32_t>& rows) const {
  std::unordered_set<BlockId> unique;
  for (int32_t row : rows) {
    const std::vector<BlockId> blocks = rows_.written_blocks(row);
    unique.insert(blocks.begin(), blocks.end());
  }
  return static_cast<int64_t>(unique.size());
}

// Moves the row to the host, if its blocks that are not there yet fit. Lookahead blocks hold
// nothing: they are given back.
bool Manager::move_out(int32_t row, std::vector<BlockId>* pairs) {
  std::vector<BlockId> known;  // (block, page of the host that holds the same) each
  std::unordered_set<BlockId> to_hold;
  int64_t num_new = 0, num_free = host_->pages().num_free();
  for (BlockId id : rows_.written_blocks(row)) {
    if (moved_.count(id) != 0) continue;
    const Hash* hash = pool_.hash_of(id);
    const BlockId page =
        hash == nullptr ? kNullBlock : host_->pages().find(*hash, pool_.group_of(id));
    if (page == kNullBlock) {
      ++num_new;
    } else {
      known.insert(known.end(), {id, page});
      // Two blocks may hold the same.
      num_free -= host_->pages().ref_count(page) == 0 && to_hold.insert(page).second;
    }
  }
  if (num_new > num_free) return false;
  publisher_.publish(row);
  ReleaseFeatures features;
  features.is_swapped_out = true;
  notify_release(row, features);
  std::unordered_set<BlockId> taken;  // whose reference is the row's already
  for (size_t i = 0; i < known.size(); i += 2) {
    host_->pages().retain(&known[i + 1], 1);  // nothing new may take its place
    moved_.emplace(known[i], known[i + 1]);
    taken.insert(known[i]);
  }
  std::vector<BlockId> pages(static_cast<size_t>(num_new));
  host_->pages().allocate(num_new, pages.data());
  const BlockId* next = pages.data();
  const std::vector<BlockId> given_back = rows_.tail_first(row, /*with_encoder=*/true);
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = rows_.blocks(row)[group.id];
    each.blocks.resize(
        static_cast<size_t>(std::max(each.num_dropped, rows_.num_written(row, group))));
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      BlockId& id = each.blocks[static_cast<size_t>(b)];
      note_dropped(row, group, b, id);  // had, and not kept
      const auto [to, is_first] = moved_.emplace(id, kNullBlock);
      if (is_first) {
        to->second = *next++;
        if (pairs == nullptr) {
          plan_.swap_out(id, to->second);
        } else {
          pairs->insert(pairs->end(), {id, to->second});
        }
        if (pool_.hash_of(id) != nullptr && options_.caches_swapped_rows) {
          host_->add_row_page(to->second, id);
        }
      } else if (taken.count(id) == 0) {
        host_->pages().retain(&to->second, 1);
      }
      id = to->second;
    }
  }
  host_->mutable_counts()->swapped_out_blocks += num_new;
  // The plan that is being made reads them.
  frees_.release_or_defer(given_back.data(), static_cast<int64_t>(given_back.size()),
                          steps().num_steps);
  rows_[row].on_host = true;
  return true;
}

std::optional<std::vector<BlockId>> Manager::swap_out(const std::vector<int32_t>& rows) {
  const Call call(this);
  check_has_host("swap_out was called");
  check_swap(rows, /*on_host=*/false);
  for (int32_t row : rows) hash_filled(row);
  check_swap(rows, /*on_host=*/false);  // a digest may call back
  if (count_unique(rows) > host_->pages().num_free()) return std::nullopt;
  std::vector<BlockId> pairs;
  moved_.clear();
  for (int32_t row : rows) move_out(row, &pairs);
  publish_offloaded();
  return pairs;
}

std::optional<std::vector<BlockId>> Manager::swap_in(const std::vector<int32_t>& rows) {
  const Call call(this);
  check_has_host("swap_in was called");
  check_swap(rows, /*on_host=*/true);
  if (count_unique(rows) > pool_.num_free()) return std::nullopt;
  std::vector<BlockId> pairs;
  moved_.clear();
  for (int32_t row : rows) move_in(row, rows_[row].num_computed, &pairs);
  return pairs;
}

// What a row on the host needs to be served: the pages that it still reads, and new ones.
Manager::Verdict Manager::resume(int32_t row, int64_t start, int64_t after, int64_t lookahead) {
  RowBlocks* h = rows_.blocks(row);
  // Blocks on the host that leave a window free nothing on the device.
  int64_t num_loads = 0, num_blocks = 0;
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = h[group.id];
    candidate_[group.id].clear();
    candidate_[group.id].blocks.assign(each.blocks.size(), kNullBlock);
    int64_t first = each.num_dropped;
    if (group.holds_tokens()) {
      first = std::max(first, std::min(group.first_needed_block(start),
                                       static_cast<int64_t>(each.blocks.size())));
    }
    candidate_[group.id].num_dropped = first;
    // A state that moves on is loaded into its new page.
    const bool moves = group.holds_state() && start > 0 &&
                       after > static_cast<int64_t>(each.blocks.size()) * group.block_size;
    for (auto b = first; b < static_cast<int64_t>(each.blocks.size()) && !moves; ++b) {
      num_loads += !shares_load(group, b, start, each.blocks[static_cast<size_t>(b)]);
      ++num_blocks;
    }
  }
  // Where nobody else has anything, there is nobody to leave something free for.
  const bool is_alone = pool_.num_free() == pool_.num_total();
  Verdict verdict = judge(candidate_.data(), start, after, lookahead, pool_.num_free() - num_loads,
                          is_alone ? 0 : options_.watermark_blocks);
  for (const Demand& demand : demand_) num_blocks += demand.num_new;
  if (verdict.status == Status::kServed) return verdict;
  return {num_blocks > pool_.num_total() ? Status::kNever : Status::kWait};
}

// Whether a block of a row that comes back is one that another row has just brought back: not where
// it is written at once.
bool Manager::shares_load(const CacheGroup& group, int64_t block, int64_t start,
                          BlockId host) const {
  if (moved_.count(host) == 0 || group.holds_state()) return false;
  return !group.is_cacheable() || (block + 1) * group.block_size <= start;
}

// Brings the row's pages back. What it does not read any more, and a state that moves on, stays
// behind: `candidate_` of `resume` says so in a step.
void Manager::move_in(int32_t row, int64_t start, std::vector<BlockId>* pairs) {
  Row& r = rows_[row];
  const bool by_step = plan_.is_step();
  std::vector<BlockId> left;
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = rows_.blocks(row)[group.id];
    const bool moves = by_step && group.holds_state() && demand_[group.id].num_new > 0;
    if (by_step) {
      const int64_t first = candidate_[group.id].num_dropped;
      for (int64_t b = each.num_dropped; b < first; ++b) {
        left.push_back(std::exchange(each.blocks[static_cast<size_t>(b)], kNullBlock));
      }
      each.num_dropped = first;
    }
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      BlockId& id = each.blocks[static_cast<size_t>(b)];
      const BlockId from = id;
      if (moves) {  // alone: a state is one page
        each.host_source = from;
        id = kNullBlock;
        each.num_dropped = b + 1;
        continue;
      }
      const auto known = moved_.find(from);
      if (known != moved_.end() && (!by_step || shares_load(group, b, start, from))) {
        id = known->second;
        pool_.retain(&id, 1);
        left.push_back(from);
        continue;
      }
      pool_.allocate(1, &id);
      moved_.emplace(from, id);
      ++host_->mutable_counts()->swapped_in_blocks;
      if (by_step) {
        onboard(row, group, b, from, id, /*is_hit=*/false);
      } else {
        pairs->insert(pairs->end(), {from, id});
        left.push_back(from);
      }
    }
  }
  std::reverse(left.begin(), left.end());
  host_->pages().release(left.data(), static_cast<int64_t>(left.size()));
  r.on_host = false;
  r.may_share = r.has_forked;
  if (by_step) {
    safe_start_ = 0;
    journal_.note_swapped(row, r);
    resend(row);
  }
}

void Manager::swap_out_rows(const StepRequest& request) {
  moved_.clear();
  swap_answers_.clear();
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    const bool is_out = move_out(row, nullptr);
    if (is_out) journal_.note_swapped(row, rows_[row]);
    swap_answers_.push_back(is_out);
  }
  moved_.clear();
}

void Manager::answer_swapped(const StepRequest& request) {
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    const Status status = swap_answers_[static_cast<size_t>(i)] ? Status::kServed : Status::kWait;
    plan_.answer(row, status, rows_[row].num_computed);
  }
}

}  // namespace kvcache
