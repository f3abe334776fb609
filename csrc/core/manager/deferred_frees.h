// Released blocks that may still be read: a step in flight, until the report on it; a
// connector that sends them, until it is done. And blocks that are to be copied, until the caller
// has taken the copies.
//
// Invariant: per block, the references counted here are those of fences, of kept blocks and of
// copies.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/manager/step_numbers.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"

namespace kvcache {

class DeferredFrees {
 public:
  // Without `is_enabled` only what is said to waits: streams protect what steps in flight read.
  DeferredFrees(BlockPool* pool, const StepNumbers* steps, bool is_enabled);

  // Whether blocks that this step reads must wait for a report.
  bool defers(int64_t step_id) const { return is_enabled_ && step_id >= steps_->num_completed; }

  // One reference less each, in the order given: now, or once step `step_id` is done.
  void release_or_defer(const BlockId* ids, int64_t n, int64_t step_id);
  // The same for blocks that no step reads but those issued.
  void release_or_defer(const BlockId* ids, int64_t n) {
    release_or_defer(ids, n, steps_->last_issued);
  }

  // The same, and at least until step `step_id` is done, enabled or not.
  void release_after(const BlockId* ids, int64_t n, int64_t step_id);

  // Keeps one reference each under this name, which must be new, until it is released.
  void keep(const std::string& name, std::vector<BlockId> ids);
  bool keeps(const std::string& name) const { return kept_.count(name) != 0; }
  void release_kept(const std::string& name);

  // Takes over one reference each of source and destination of these copies, until they are taken.
  void await_copies(const std::vector<BlockId>& pairs);
  // (source, destination) each, in the order in which they came; none waits from now on.
  std::vector<BlockId> take_copies();
  bool awaits_copies() const { return !copies_.empty(); }

  // Releases what waits for steps that are done.
  void release_completed();
  // Nothing reads any more for the steps behind the last issued one: what waits for them waits for
  // that one.
  void forget_aborted();

  int64_t num_waiting() const { return num_waiting_; }  // references of fences
  int64_t num_kept() const { return num_kept_; }        // references under names
  int32_t num_waiting_of(BlockId id) const { return waiting_[id]; }
  int32_t num_kept_of(BlockId id) const { return kept_of_[id]; }

  // Adds to `references` what is held here. Throws std::logic_error where it is not what was
  // counted.
  void check_invariants(PerBlock<int32_t>* references) const;

 private:
  struct Fence {
    int64_t step_id;
    std::vector<BlockId> ids;
  };

  void add_fence(const BlockId* ids, int64_t n, int64_t step_id);

  BlockPool* pool_;
  const StepNumbers* steps_;
  bool is_enabled_;
  std::deque<Fence> fences_;  // by step
  std::unordered_map<std::string, std::vector<BlockId>> kept_;
  std::vector<BlockId> copies_;  // (source, destination) each
  PerBlock<int32_t> waiting_;    // references that fences hold
  PerBlock<int32_t> kept_of_;    // references that names and copies hold
  int64_t num_waiting_ = 0, num_kept_ = 0;
};

}  // namespace kvcache
