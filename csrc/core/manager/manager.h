// SPDX-License-Identifier: Apache-2.0
// The request manager maps requests to rows, and allocates blocks for a whole batch per call
// (docs/blocks.md).
//
// `step` allocates blocks to rows, the stable indices of requests in the block tables, and returns
// the table changes as one StepPlan. `admit`, `extend` and `advance` allocate blocks for single
// requests of a caller that maintains its own tables. A row can only be served by the kind of call
// that admitted it. All other calls accept both kinds of rows.
//
// A manager belongs to the thread that first uses it. Every call that changes the manager first
// checks its arguments, then computes the hashes that it needs, and then makes its changes. Hashing
// can be interrupted, and lets signal handlers and other threads run, whose calls to the manager
// are rejected. If memory runs out during the changes, the manager is broken: every later call
// except `free` throws.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/listeners/event_log.h"
#include "core/manager/cache_stats.h"
#include "core/manager/cache_tiers.h"
#include "core/manager/call_guard.h"
#include "core/manager/manager_reads.h"
#include "core/manager/miss_reasons.h"
#include "core/manager/options.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/publisher.h"
#include "core/manager/recovery.h"
#include "core/manager/request_checks.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/row_server.h"
#include "core/manager/row_swap.h"
#include "core/manager/row_table.h"
#include "core/manager/session_pins.h"
#include "core/manager/step_plan.h"
#include "core/manager/step_request.h"
#include "core/manager/steps.h"
#include "core/manager/token_intake.h"
#include "core/pool/block_pool.h"
#include "core/prefault.h"

namespace kvcache {

class Manager {
 public:
  explicit Manager(const ManagerOptions& options);

  // What callers can read of the manager.
  const ManagerReads& reads() const { return reads_; }
  const BlockPool& pool() const { return tiers_.pool(); }
  BlockPool& pool() { return tiers_.pool(); }
  // The host pool; null without a host tier.
  const BlockPool* host() const { return tiers_.host_pages(); }
  BlockPool* host() { return tiers_.host_pages(); }
  const CacheStats& stats() const { return stats_; }
  void clear_stats();
  EventLog::Drained drain_events();  // removes and returns the events

  // All calls up to `check_invariants` make the check `check_caller` or `check_reader`.
  CallGuard& guard() { return guard_; }
  const CallGuard& guard() const { return guard_; }

  void set_now(int64_t ms);  // see Clock

  const HashList& hashes(TokenChain& chain);

  // Returns why tokens of a request were not found in the cache when it was admitted as this row,
  // or would not be found if it were admitted now (row -1). Throws std::invalid_argument without
  // `ManagerOptions::explain_misses`.
  MissReport explain(const std::shared_ptr<TokenChain>& chain, int32_t row);

  // Returns the longest cached prefix, in whole blocks unless `with_partial`, of at most
  // `most_tokens` tokens. `read_cache` overrides the setting of the chain (see PrefixFinder). The
  // result is valid until the next call.
  const PrefixHit& lookup(TokenChain& chain, bool with_host = false, bool with_partial = false,
                          std::optional<bool> read_cache = std::nullopt,
                          int64_t most_tokens = kUnbounded);

  // Returns the copies, as (source, destination) pairs, that hits of `admit` have required since
  // the last call.
  std::vector<BlockId> take_copies();

  // Returns the status that a step with only this new request would return. With `whole`, returns
  // the status for all known tokens, computed in chunks of num_tokens tokens.
  Status would_fit(const NewRow& asked, bool whole);
  // Returns the status that the row would get if it were served with this number of new tokens.
  Status would_extend(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens);

  // Returns how many of the next num_tokens tokens a step should compute, so that it ends where
  // recurrent states are kept (see HitEnds). `row`: the row of the request, or -1.
  int64_t checkpoint_tokens(TokenChain& chain, int32_t row, int64_t num_tokens);

  // Serves running rows, then new requests, in the given order. The plan is valid until the next
  // call.
  const StepPlan& step(const StepRequest& request);

  // Creates a row with the blocks of a previous lookup, and with slots for its external tokens and
  // num_tokens additional tokens. `new_blocks` in the result excludes the computed blocks.
  Slots admit(const NewRow& asked, const std::vector<std::vector<BlockId>>& computed);

  // Reports that this number of a row's external tokens have arrived and that no more will follow.
  // Returns the row's number of computed tokens, from which it continues.
  int64_t finish_receiving(int32_t row, int64_t num_tokens);

  // Serves a row created by `admit`. If the slots do not fit, nothing changes. `lists_new`: whether
  // the result lists the new blocks.
  Slots extend(const RowAsk& ask, bool lists_new = true);
  // The same for several rows, in this order. If one of the requests is rejected or hashing is
  // interrupted, no row changes.
  std::vector<Slots> advance(const std::vector<RowAsk>& asks);

  // Removes the last num_tokens tokens of a row, which are rejected drafts. The next tokens of the
  // row reuse their slots.
  void reject(int32_t row, int64_t num_tokens);

  // Creates a row for `child`, which starts with all computed tokens of the row and shares its
  // blocks. Shared blocks are copy-on-write.
  Slots fork(int32_t row, const std::shared_ptr<TokenChain>& child);

  // Swaps out rows created by `admit`, and back in (see RowSwap). The moves must be executed in the
  // order of the calls.
  std::optional<std::vector<BlockId>> swap_out(const std::vector<int32_t>& rows);
  std::optional<std::vector<BlockId>> swap_in(const std::vector<int32_t>& rows);

  // Reports that the first num_tokens tokens of a row created by `admit` have KV.
  void mark_computed(int32_t row, int64_t num_tokens);

  // Notifies the eviction policy that the blocks of the row were used.
  void access(int32_t row, double now);

  // Frees rows one by one. Publishes the blocks filled since the row was last served, and releases
  // its blocks, tail first. `features`: the caller's data about the conversations, for the eviction
  // policy. Has no effect on a broken manager.
  void free(const int32_t* rows, int64_t n, const ReleaseFeatures& features = {},
            const KeptNames& kept = {});
  void free(int32_t row, const ReleaseFeatures& features = {}) { free(&row, 1, features); }
  // Adds a reference to each of these held or cached blocks until release_held is called. Ids may
  // repeat.
  void hold(const BlockId* ids, int64_t n);
  // Removes one reference of `hold` per id, in the given order.
  void release_held(const BlockId* ids, int64_t n);
  // Releases the blocks that were kept under this name.
  void release_kept(const std::string& name);

  // Processes a worker's report on a step. If completed, this step and all earlier ones are done.
  // Otherwise, this step and all later ones are aborted: their results are removed from the cache,
  // and the rows return to their earlier state. The `failed` device blocks and `failed_on_host`
  // pages, which were not written correctly, are invalidated.
  Recompute report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                   const std::vector<BlockId>& failed_on_host);

  // Invalidates blocks with wrong content. These blocks and everything computed from them are
  // removed from the cache, and rows that used them return to their valid tokens.
  Recompute invalidate(const BlockId* ids, int64_t n);

  // See SessionPins.
  int64_t pin(const std::string& session, TokenChain& chain);
  int64_t unpin(const std::string& session);

  // Removes the hashes of these blocks, which may be held or free (see BlockPool::evict).
  void evict(const BlockId* ids, int64_t n);

  // Remove all cached content, or that of one group. Return false, without any change, while rows
  // hold such blocks or loads are in flight.
  bool reset_prefix_cache();
  bool reset_group(int64_t group);

  // Must be called after the weights have changed. Earlier hashes are no longer found, and existing
  // rows publish nothing more.
  void start_epoch();
  // The same for the content computed with the adapter of this name.
  void forget_adapter(std::string_view name);

  // Checks the invariants of the pools, and that all references are held by rows and fences.
  void check_invariants() const;

 private:
  Soundness::Change change(const char* call) { return {&guard_.soundness(), call}; }
  PrefixHit hit_of(const NewRow& asked, const std::vector<std::vector<BlockId>>& computed);
  void take_in(const RowAsk* asks, size_t n);

  // Guards a call that may change the manager or read data of its thread.
  struct Call {
    explicit Call(Manager* manager) : scope(&manager->guard_) { manager->tiers_.read_clock(); }
    CallGuard::Scope scope;
  };

  std::vector<int64_t> external_hits(const std::vector<NewRow>& requests);

  ManagerSetup setup_;
  Prefault prefault_;  // records the arrays that the members below allocate
  CallGuard guard_;
  RowTable rows_;
  Steps steps_;
  CacheTiers tiers_;
  RowContext context_;  // copied by the components below
  CacheStats stats_;
  PrefixFinder finder_;
  std::unique_ptr<MissReasons> misses_;  // null: off
  // Whether hits of `admit` may end inside blocks. False if a state would have to be copied, or if
  // a group that is not cached would need zeros.
  bool copies_hits_;
  Publisher publisher_;
  RequestChecks checks_;
  TokenIntake intake_;
  RowRelease release_;
  RowSwap swap_;
  RowServer server_;
  Recovery recovery_;
  SessionPins pins_;
  ManagerReads reads_;
};

}  // namespace kvcache
