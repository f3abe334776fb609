// The plan of a step while it is being made: its answers and its changes.
//
// Between steps it keeps what the next plan must say: rows that have left, rows whose tables
// must be sent anew. Within a step it keeps the blocks that the plan reads.
// Invariant: a plan names each row once per section, and each page once as a destination.
#pragma once

#include <cstdint>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/row_blocks.h"
#include "core/manager/step_plan.h"
#include "core/pool/per_block.h"

namespace kvcache {

class PlanBuilder {
 public:
  // `num_blocks`: of the device's pool.
  PlanBuilder(size_t num_groups, int64_t num_blocks);

  void begin(int64_t step_id, int64_t previous_step_id = -1);
  const StepPlan& end();  // valid until the next `begin`
  // A call outside of steps: it has no plan, only pairs that its caller answers.
  void begin_direct() { direct_pairs_.clear(); }
  const std::vector<int32_t>& direct_pairs() const { return direct_pairs_; }
  bool is_step() const { return is_step_; }

  // The answers come in three parts: to running rows, to rows that are to leave, to requests.
  void set_parts(int64_t num_running, int64_t num_leaving) {
    plan_.num_running = num_running;
    plan_.num_leaving = num_leaving;
  }
  // The answer to a row that was asked for; -1: it got none.
  void answer(int32_t row, Status status, int64_t num_computed_tokens, int64_t num_tokens) {
    plan_.rows.push_back(row);
    plan_.status.push_back(static_cast<uint8_t>(status));
    plan_.num_computed_tokens.push_back(static_cast<int32_t>(num_computed_tokens));
    plan_.num_tokens.push_back(static_cast<int32_t>(num_tokens));
  }
  // A row that begins anew in this step.
  void clear(int32_t row) { plan_.clear_rows.push_back(row); }
  // The row's blocks from from[g] on, in every group g.
  void append(int32_t row, const RowBlocks* blocks, const int64_t* from);
  // One entry of a table that the worker has.
  void replace(int32_t row, uint8_t group, int64_t block, BlockId id) {
    if (!is_step_ || must_resend(row)) return;
    std::vector<int32_t>& replace = plan_.groups[group].replace;
    replace.insert(replace.end(), {row, static_cast<int32_t>(block), id});
  }
  // Blocks that the row reads are filled by another one in this step.
  void depend(int32_t row, int32_t on) {
    const std::vector<int32_t>& pairs = plan_.depends_on;
    for (size_t i = pairs.size(); i > 0 && pairs[i - 2] == row; i -= 2) {
      if (pairs[i - 1] == on) return;
    }
    add(&plan_.depends_on, row, on);
  }
  void copy(BlockId source, BlockId target) { add(&plan_.copy, source, target); }
  void zero(BlockId page) { plan_.zero.push_back(page); }
  void swap_out(BlockId device, BlockId host) { add(&plan_.swap_out, device, host); }
  void swap_in(BlockId host, BlockId device) { add(&plan_.swap_in, host, device); }

  // Takes over one reference of a block that the plan reads, until the step ends.
  void hold(BlockId id) {
    held_.push_back(id);
    ++num_held_[id];
  }
  int32_t num_held(BlockId id) const { return num_held_[id]; }
  // The references that were taken over, in that order; holds none from now on.
  std::vector<BlockId> take_held();

  // The next plan clears a row that left.
  void clear_later(int32_t row) { clear_rows_.push_back(row); }
  // The next plan sends the row's whole table: until then no single entry is replaced.
  void resend(int32_t row);
  bool must_resend(int32_t row) const {
    return row < static_cast<int64_t>(is_resent_.size()) && is_resent_[row] != 0;
  }
  void forget_resend(int32_t row) {
    if (must_resend(row)) is_resent_[row] = 0;
  }
  // The rows to send, in the order in which they were named; none is left.
  std::vector<int32_t> take_resent();

  // Checks the plan that was made last. Throws std::logic_error.
  void check_invariants() const;

 private:
  void add(std::vector<int32_t>* section, int32_t first, int32_t second) {
    if (!is_step_) section = &direct_pairs_;
    section->insert(section->end(), {first, second});
  }

  StepPlan plan_;
  std::vector<int32_t> direct_pairs_;
  bool is_step_ = false;
  std::vector<int32_t> clear_rows_;  // that left since the last step
  std::vector<int32_t> resend_;
  std::vector<uint8_t> is_resent_;  // by row
  std::vector<BlockId> held_;
  PerBlock<int32_t> num_held_;
};

}  // namespace kvcache
