// SPDX-License-Identifier: Apache-2.0
// Released blocks that may still be read.
//
// A step in flight may read a block until the step is reported as done. A connector may read a
// block until it has sent the block. The source and destination of a copy are held until the caller
// takes the copies. Invariant: the per-block counts equal the references held by fences, under
// names and by copies.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/manager/step_journal.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"

namespace kvcache {

class DeferredFrees {
 public:
  // Without `is_enabled`, a release is deferred only on explicit request, because the order of the
  // CUDA stream protects the reads of steps in flight.
  DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled);

  // Whether blocks that this step reads must be held until the step is reported as done.
  bool defers(int64_t step_id) const { return is_enabled_ && step_id >= steps_->num_completed; }

  // Removes one reference from each block, in the given order, immediately or when step `step_id`
  // is done.
  void release_or_defer(const Blocks& blocks, int64_t step_id);
  // Releases blocks that no step after the last issued step reads.
  void release_or_defer(const Blocks& blocks) { release_or_defer(blocks, steps_->last_issued); }

  // Removes the references when step `step_id` is done, even if deferral is not enabled.
  void release_after(const Blocks& blocks, int64_t step_id);

  // Keeps one reference to each block under this name, which must be new, until release_kept is
  // called.
  void keep(const std::string& name, std::vector<BlockId> ids);
  bool keeps(const std::string& name) const { return kept_.count(name) != 0; }
  void release_kept(const std::string& name);

  // Takes over one reference to the source and to the destination of each copy, until take_copies
  // is called.
  void await_copies(const std::vector<BlockId>& pairs);
  // Returns the pending (source, destination) pairs in order of arrival, and removes them.
  std::vector<BlockId> take_copies();
  bool awaits_copies() const { return !copies_.empty(); }

  // Releases the blocks that wait for completed steps.
  void release_completed();
  // Called after steps have been aborted. Blocks that wait for an aborted step wait for the last
  // issued step instead.
  void forget_aborted();

  int64_t num_waiting() const { return num_waiting_; }  // references held by fences
  int64_t num_kept() const { return num_kept_; }        // references held under names
  int32_t num_waiting_of(BlockId id) const { return waiting_[id]; }
  int32_t num_kept_of(BlockId id) const { return kept_of_[id]; }

  // Adds the references held by this object to `references`. Throws std::logic_error if the counts
  // are wrong.
  void check_invariants(PerBlock<int32_t>* references) const;

 private:
  struct Fence {
    int64_t step_id;
    std::vector<BlockId> ids;
  };

  void release(const Blocks& blocks, int64_t step_id, bool is_deferred);
  void add_fence(const Blocks& blocks, int64_t step_id);

  BlockPool* pool_;
  const StepNumbers* steps_;
  bool is_enabled_;
  std::deque<Fence> fences_;  // ordered by step
  std::unordered_map<std::string, std::vector<BlockId>> kept_;
  std::vector<BlockId> copies_;  // (source, destination) pairs
  PerBlock<int32_t> waiting_;    // references held by fences
  PerBlock<int32_t> kept_of_;    // references held under names and by copies
  int64_t num_waiting_ = 0, num_kept_ = 0;
};

}  // namespace kvcache
