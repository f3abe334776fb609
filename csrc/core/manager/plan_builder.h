// SPDX-License-Identifier: Apache-2.0
// Builds the plan of a step, which consists of results and changes.
//
// Between steps, collects the freed rows to clear, and the rows whose tables must be sent again.
// Invariant: a plan names each row at most once per section, and each page at most once as a
// destination.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/groups/row_blocks.h"
#include "core/manager/step_plan.h"
#include "core/pool/per_block.h"

namespace kvcache {

class PlanBuilder {
 public:
  // `num_blocks`: blocks of the device pool.
  PlanBuilder(size_t num_groups, int64_t num_blocks) : num_held_(num_blocks) {
    plan_.groups.resize(num_groups);
  }

  void begin(int64_t step_id, int64_t previous_step_id = -1) {
    plan_.clear();
    plan_.step_id = step_id;
    plan_.previous_step_id = previous_step_id;
    plan_.clear_rows.swap(clear_rows_);
    is_step_ = true;
  }
  // Valid until the next `begin`.
  const StepPlan& end() {
    std::vector<int32_t>& clear = plan_.clear_rows;
    std::sort(clear.begin(), clear.end());
    clear.erase(std::unique(clear.begin(), clear.end()), clear.end());
    drop_filled();
    is_step_ = false;
    return plan_;
  }
  // Starts a call outside of steps, which creates only pairs for the caller and no plan.
  void begin_direct() { direct_pairs_.clear(); }
  const std::vector<int32_t>& direct_pairs() const { return direct_pairs_; }
  bool is_step() const { return is_step_; }

  // Sets the number of results for running rows, which come first, and for rows to swap out, which
  // come second. The results for new requests follow.
  void set_parts(int64_t num_running, int64_t num_leaving) {
    plan_.num_running = num_running;
    plan_.num_leaving = num_leaving;
  }
  // Adds the results for the running rows of a step, which count as served until `refuse` is
  // called. Returns their num_computed_tokens, which the caller sets before it adds other results.
  int32_t* answer_running(const int32_t* rows, const int32_t* num_tokens, int64_t n) {
    plan_.rows.assign(rows, rows + n);
    plan_.status.assign(static_cast<size_t>(n), static_cast<uint8_t>(Status::kServed));
    plan_.num_tokens.assign(num_tokens, num_tokens + n);
    plan_.num_computed_tokens.resize(static_cast<size_t>(n));
    return plan_.num_computed_tokens.data();
  }
  // Changes the result for the i-th running row to one that is not served.
  void refuse(int64_t i, Status status) {
    plan_.status[static_cast<size_t>(i)] = static_cast<uint8_t>(status);
    plan_.num_tokens[static_cast<size_t>(i)] = 0;
  }
  // Adds a result. `row` is -1 for a request that was not admitted.
  void answer(int32_t row, Status status, int64_t num_computed_tokens, int64_t num_tokens) {
    plan_.rows.push_back(row);
    plan_.status.push_back(static_cast<uint8_t>(status));
    plan_.num_computed_tokens.push_back(static_cast<int32_t>(num_computed_tokens));
    plan_.num_tokens.push_back(static_cast<int32_t>(num_tokens));
  }
  // Clears a row that starts in this step.
  void clear(int32_t row) { plan_.clear_rows.push_back(row); }
  // Appends the blocks of the row to its tables, starting with block from[g] in each group g.
  void append(int32_t row, const RowBlocks* blocks, const int64_t* from) {
    const size_t num_groups = plan_.groups.size();
    bool any = false;
    for (size_t g = 0; g < num_groups; ++g) any |= blocks[g].size() > from[g];
    if (!any) return;
    plan_.append_rows.push_back(row);
    for (size_t g = 0; g < num_groups; ++g) {
      StepPlan::Group& group = plan_.groups[g];
      const std::vector<BlockId>& ids = blocks[g].blocks;
      group.append_ids.insert(group.append_ids.end(), ids.begin() + from[g], ids.end());
      group.append_splits.push_back(static_cast<int32_t>(group.append_ids.size()));
    }
  }
  // Replaces one entry of a table that the worker already has.
  void replace(int32_t row, uint8_t group, int64_t block, BlockId id) {
    if (!is_step_ || must_resend(row)) return;
    std::vector<int32_t>& replace = plan_.groups[group].replace;
    replace.insert(replace.end(), {row, static_cast<int32_t>(block), id});
  }
  void copy(BlockId source, BlockId target) { add(&plan_.copy, source, target); }
  void zero(BlockId page) { plan_.zero.push_back(page); }
  // Records pages that a row was just given. `end` keeps those that the plan does not fill.
  void give(const BlockId* pages, int64_t n) {
    if (is_step_) plan_.fresh.insert(plan_.fresh.end(), pages, pages + n);
  }
  void swap_out(BlockId device, BlockId host) { add(&plan_.swap_out, device, host); }
  void swap_in(BlockId host, BlockId device) { add(&plan_.swap_in, host, device); }

  // Takes over one reference to a block that the plan reads, until the step ends.
  void hold(BlockId id) {
    held_.push_back(id);
    ++num_held_[id];
  }
  int32_t num_held(BlockId id) const { return num_held_[id]; }
  // Removes and returns the held references, in the order in which they were taken over.
  std::vector<BlockId> take_held() {
    for (BlockId id : held_) num_held_[id] = 0;
    return std::exchange(held_, {});
  }

  // Makes the next plan clear this row, which was freed.
  void clear_later(int32_t row) { clear_rows_.push_back(row); }
  // Makes the next plan send the complete table of the row. Until then, single entries are not
  // replaced.
  void resend(int32_t row) {
    if (must_resend(row)) return;
    if (row >= static_cast<int64_t>(is_resent_.size())) {
      is_resent_.resize(static_cast<size_t>(row) + 1);
    }
    is_resent_[row] = 1;
    resend_.push_back(row);
  }
  bool must_resend(int32_t row) const {
    return row < static_cast<int64_t>(is_resent_.size()) && is_resent_[row] != 0;
  }
  void forget_resend(int32_t row) {
    if (must_resend(row)) is_resent_[row] = 0;
  }
  // Returns the rows to send, in the order of the `resend` calls, and clears the list.
  std::vector<int32_t> take_resent() {
    std::vector<int32_t> rows;
    for (int32_t row : resend_) {
      if (!must_resend(row)) continue;
      is_resent_[row] = 0;
      rows.push_back(row);
    }
    resend_.clear();
    return rows;
  }

  // Checks the last plan. Throws std::logic_error.
  void check_invariants() const {
    for (const std::vector<int32_t>* rows : {&plan_.rows, &plan_.append_rows, &plan_.clear_rows}) {
      std::unordered_set<int32_t> seen;
      for (int32_t row : *rows) require(row < 0 || seen.insert(row).second, "a row twice: ", row);
    }
    std::unordered_set<int32_t> written, loaded, sources, host_written;
    const auto check_filled = [&](BlockId page, const char* how) {
      require(written.insert(page).second, "a page is written twice: ", page);
      require(sources.count(page) == 0, "a page is copied before it is ", how, ": ", page);
    };
    for (size_t i = 0; i < plan_.copy.size(); i += 2) {
      sources.insert(plan_.copy[i]);
      require(written.insert(plan_.copy[i + 1]).second,
              "a page is written twice: ", plan_.copy[i + 1]);
    }
    for (const std::vector<int32_t>* pages : {&plan_.zero, &plan_.fresh}) {
      for (BlockId page : *pages) check_filled(page, "written");
    }
    for (size_t i = 0; i < plan_.swap_in.size(); i += 2) {
      check_filled(plan_.swap_in[i + 1], "loaded");
      loaded.insert(plan_.swap_in[i]);
    }
    for (size_t i = 0; i < plan_.swap_out.size(); i += 2) {
      const BlockId page = plan_.swap_out[i + 1];
      require(host_written.insert(page).second, "a host page is written twice: ", page);
      require(loaded.count(page) == 0, "a host page is written and loaded: ", page);
    }
    require(is_step_ || held_.empty(), "blocks are held for a step that is over");
  }

 private:
  // Removes the pages that another section fills from `fresh`.
  void drop_filled() {
    std::vector<int32_t>& fresh = plan_.fresh;
    if (fresh.empty()) return;
    std::vector<int32_t> filled = plan_.zero;
    for (const std::vector<int32_t>* pairs : {&plan_.copy, &plan_.swap_in}) {
      for (size_t i = 1; i < pairs->size(); i += 2) filled.push_back((*pairs)[i]);
    }
    if (filled.empty()) return;
    std::sort(filled.begin(), filled.end());
    fresh.erase(std::remove_if(fresh.begin(), fresh.end(),
                               [&](BlockId page) {
                                 return std::binary_search(filled.begin(), filled.end(), page);
                               }),
                fresh.end());
  }
  void add(std::vector<int32_t>* section, int32_t first, int32_t second) {
    if (!is_step_) section = &direct_pairs_;
    section->insert(section->end(), {first, second});
  }

  StepPlan plan_;
  std::vector<int32_t> direct_pairs_;
  bool is_step_ = false;
  std::vector<int32_t> clear_rows_;  // rows freed since the last step
  std::vector<int32_t> resend_;
  std::vector<uint8_t> is_resent_;  // by row
  std::vector<BlockId> held_;
  PerBlock<int32_t> num_held_;
};

}  // namespace kvcache
