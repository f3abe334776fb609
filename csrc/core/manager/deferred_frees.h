// Released blocks that a step in flight may still read: they wait for the report on that step.
//
// Invariant: per block, the references counted here are those of the fences that wait.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/manager/step_numbers.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"

namespace kvcache {

class DeferredFrees {
 public:
  // Without `is_enabled` nothing waits: streams protect what steps in flight read.
  DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled);

  // Whether blocks that this step reads must wait for a report.
  bool defers(int64_t step_id) const { return is_enabled_ && step_id >= steps_->num_completed; }

  // One reference less each, in the order given: now, or once step `step_id` is done.
  void release_or_defer(const BlockId* ids, int64_t n, int64_t step_id);
  // The same for blocks that no step reads but those issued.
  void release_or_defer(const BlockId* ids, int64_t n) {
    release_or_defer(ids, n, steps_->last_issued);
  }

  // Releases what waits for steps that are done.
  void release_completed();
  // Nothing reads any more for the steps behind the last issued one: what waits for them waits for
  // that one.
  void forget_aborted();

  int64_t num_waiting() const { return num_waiting_; }  // references
  int32_t num_waiting_of(BlockId id) const { return waiting_.empty() ? 0 : waiting_[id]; }

  // Adds to `references` what the fences hold. Throws std::logic_error where it is not what was
  // counted.
  void check_invariants(PerBlock<int32_t>* references) const;

 private:
  struct Fence {
    int64_t step_id;
    std::vector<BlockId> ids;
  };

  BlockPool* pool_;
  const StepNumbers* steps_;
  bool is_enabled_;
  std::deque<Fence> fences_;   // by step
  PerBlock<int32_t> waiting_;  // references that fences hold; empty where nothing ever waits
  int64_t num_waiting_ = 0;
};

}  // namespace kvcache
