// SPDX-License-Identifier: Apache-2.0
#include "core/manager/plan_builder.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/errors.h"

namespace kvcache {

void StepPlan::clear() {
  for (std::vector<int32_t>* each : {&rows, &num_computed_tokens, &num_tokens, &clear_rows,
                                     &append_rows, &swap_out, &copy, &zero, &fresh, &swap_in}) {
    each->clear();
  }
  status.clear();
  num_running = num_leaving = 0;
  for (Group& group : groups) {
    group.append_splits.assign(1, 0);
    group.append_ids.clear();
    group.replace.clear();
  }
}

bool StepPlan::is_empty() const {
  for (const std::vector<int32_t>* each :
       {&clear_rows, &append_rows, &swap_out, &copy, &zero, &fresh, &swap_in}) {
    if (!each->empty()) return false;
  }
  return std::all_of(groups.begin(), groups.end(),
                     [](const Group& group) { return group.replace.empty(); });
}

PlanBuilder::PlanBuilder(size_t num_groups, int64_t num_blocks) : num_held_(num_blocks) {
  plan_.groups.resize(num_groups);
}

void PlanBuilder::begin(int64_t step_id, int64_t previous_step_id) {
  plan_.clear();
  plan_.step_id = step_id;
  plan_.previous_step_id = previous_step_id;
  plan_.clear_rows.swap(clear_rows_);
  is_step_ = true;
}

const StepPlan& PlanBuilder::end() {
  std::vector<int32_t>& clear = plan_.clear_rows;
  std::sort(clear.begin(), clear.end());
  clear.erase(std::unique(clear.begin(), clear.end()), clear.end());
  drop_filled();
  is_step_ = false;
  return plan_;
}

// Removes the pages that another section fills from `fresh`.
void PlanBuilder::drop_filled() {
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

int32_t* PlanBuilder::answer_running(const int32_t* rows, const int32_t* num_tokens, int64_t n) {
  plan_.rows.assign(rows, rows + n);
  plan_.status.assign(static_cast<size_t>(n), static_cast<uint8_t>(Status::kServed));
  plan_.num_tokens.assign(num_tokens, num_tokens + n);
  plan_.num_computed_tokens.resize(static_cast<size_t>(n));
  return plan_.num_computed_tokens.data();
}

void PlanBuilder::append(int32_t row, const RowBlocks* blocks, const int64_t* from) {
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

void PlanBuilder::resend(int32_t row) {
  if (must_resend(row)) return;
  if (row >= static_cast<int64_t>(is_resent_.size())) {
    is_resent_.resize(static_cast<size_t>(row) + 1);
  }
  is_resent_[row] = 1;
  resend_.push_back(row);
}

std::vector<int32_t> PlanBuilder::take_resent() {
  std::vector<int32_t> rows;
  for (int32_t row : resend_) {
    if (!must_resend(row)) continue;
    is_resent_[row] = 0;
    rows.push_back(row);
  }
  resend_.clear();
  return rows;
}

void PlanBuilder::check_invariants() const {
  for (const std::vector<int32_t>* rows : {&plan_.rows, &plan_.append_rows, &plan_.clear_rows}) {
    std::unordered_set<int32_t> seen;
    for (int32_t row : *rows) require(row < 0 || seen.insert(row).second, "a row twice: ", row);
  }
  std::unordered_set<int32_t> written, loaded, sources, host_written;
  for (size_t i = 0; i < plan_.copy.size(); i += 2) {
    sources.insert(plan_.copy[i]);
    require(written.insert(plan_.copy[i + 1]).second,
            "a page is written twice: ", plan_.copy[i + 1]);
  }
  for (const std::vector<int32_t>* pages : {&plan_.zero, &plan_.fresh}) {
    for (BlockId page : *pages) {
      require(written.insert(page).second, "a page is written twice: ", page);
      require(sources.count(page) == 0, "a page is copied before it is written: ", page);
    }
  }
  for (size_t i = 0; i < plan_.swap_in.size(); i += 2) {
    const BlockId page = plan_.swap_in[i + 1];
    require(written.insert(page).second, "a page is written twice: ", page);
    require(sources.count(page) == 0, "a page is copied before it is loaded: ", page);
    loaded.insert(plan_.swap_in[i]);
  }
  for (size_t i = 0; i < plan_.swap_out.size(); i += 2) {
    const BlockId page = plan_.swap_out[i + 1];
    require(host_written.insert(page).second, "a host page is written twice: ", page);
    require(loaded.count(page) == 0, "a host page is written and loaded: ", page);
  }
  require(is_step_ || held_.empty(), "blocks are held for a step that is over");
}

}  // namespace kvcache
