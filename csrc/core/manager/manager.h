// The request-level manager: rows of requests over a block pool, a whole batch per call.
//
// Two tiers of one page size: the device's pool and, where there is one, the host's. Pages move
// between them by pairs of the plan: rows that are swapped out and back, and cached blocks that
// live on on the host when the device has evicted them.
//
// A row is a request's stable place in the tables. `step` decides for every asked row which blocks
// it gets in every cache group; what changed in the tables leaves as one StepPlan. `allocate` and
// `append` decide for one request of a caller that keeps its own tables. A row belongs to the
// driver that admitted it; the other calls serve both.
//
// A manager belongs to the thread that first uses it. Every call that changes something first
// checks, then hashes what it will need, then changes: a digest from Python may raise or call back,
// and nothing may have been changed by then, or be changed by others before the call ends. Where
// memory runs out after that, the manager is broken, and every later call but `free` says so.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/cache_tiers.h"
#include "core/manager/call_guard.h"
#include "core/manager/checkpoints.h"
#include "core/manager/options.h"
#include "core/manager/prefix_finder.h"
#include "core/manager/publisher.h"
#include "core/manager/recovery.h"
#include "core/manager/request_checks.h"
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
#include "core/pool/event_log.h"

namespace kvcache {

class Manager {
 public:
  explicit Manager(const ManagerOptions& options);

  int64_t hash_block_size() const { return setup_.hash_block_size; }
  int64_t hash_bytes() const { return setup_.options.hash_bytes; }
  const std::vector<CacheGroup>& groups() const { return setup_.groups; }
  const BlockPool& pool() const { return tiers_.pool(); }
  BlockPool& pool() { return tiers_.pool(); }
  // The host's pool; null where there is none.
  const BlockPool* host() const { return tiers_.host_pages(); }
  BlockPool* host() { return tiers_.host_pages(); }
  const CacheStats& stats() const { return stats_; }
  const TierCount& tiers() const { return tiers_.counts(); }
  void clear_stats();
  // What the device's eviction policy has learned; none where it does not. `learn`: as many
  // numbers.
  std::vector<double> learned() const;
  void learn(const std::vector<double>& numbers);
  const EventLog::Drained& events();  // that wait to be drained
  EventLog::Drained drain_events();

  // As CallGuard says. All calls up to `check_invariants` check it.
  void check_caller() { guard_.check_caller(); }
  void check_reader() const { guard_.check_reader(); }
  bool is_broken() const { return guard_.is_broken(); }
  void check_sound() const { guard_.check_sound(); }
  // Until it ends, an exception breaks the manager: for what belongs to a call and follows on it.
  Soundness::Change change(const char* call) { return {soundness(), call}; }
  Soundness* soundness() { return &guard_.soundness(); }

  // The clock of residency times and of eviction policies: milliseconds since any moment, for all
  // calls from now on. Throws where it would go back. Without it, each call that may publish,
  // release or evict asks the system's steady clock, since when the manager was made.
  void set_now(int64_t ms);

  const std::vector<Hash>& hashes(TokenChain& chain);

  // out[i]: the oldest block of the group that is found under hashes[i] on the device, or on the
  // host; -1 where there is none.
  void find_hashes(const Hash* hashes, int64_t n, int64_t group, bool on_host, BlockId* out) const;
  // The hash that a block is found under, and its group in `*group`; null where there is none.
  const Hash* hash_of(BlockId id, bool on_host, int32_t* group) const;

  // Longest cached prefix, of whole blocks unless `with_partial`, at most num_tokens - 1 tokens:
  // the last token must run. None where the request opted out of reading. Changes nothing; valid
  // until the next call. `read_cache`: of this call, else the chain's.
  const PrefixHit& lookup(TokenChain& chain, bool with_host = false, bool with_partial = false,
                          std::optional<bool> read_cache = std::nullopt);

  // The copies that hits of `allocate` need, (source, destination) each, since the last call.
  std::vector<BlockId> take_copies();

  // The answer that a step would give its only new request now. `whole`: that of all its known
  // tokens, in chunks of as many tokens as it asks for.
  Status would_fit(const StepRequest& request, bool whole);
  // The answer that a row would get which asks for so many tokens more.
  Status would_extend(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens);

  // How many of the next num_tokens tokens of a request, in this row or -1, a step is to compute so
  // that it ends where recurrent states are kept; see Checkpoints.
  int64_t checkpoint_tokens(TokenChain& chain, int32_t row, int64_t num_tokens);

  // Serves running rows, then new ones, in the order given. Throws on a request that cannot be
  // meant (unknown row, a row twice, no tokens, beyond max_model_len) before anything changes.
  // The plan is valid until the next call.
  const StepPlan& step(const StepRequest& request);

  // A row with these blocks per group, which the caller looked up, and slots for its external
  // tokens and num_tokens more. `new_blocks` are without the computed ones.
  Slots allocate(const NewRow& asked, const std::vector<std::vector<BlockId>>& computed,
                 int64_t num_lookahead_tokens);

  // So many of a receiving row's external tokens are there, and no more will come: what they fill
  // is published, and the row goes on behind them. Where it goes on.
  int64_t finish_receiving(int32_t row, int64_t num_tokens);

  // Slots for num_tokens tokens more in a row that `allocate` gave.
  Slots append(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens);

  // The same of several rows by token positions. First the chains of all take the ids that have
  // become known; where one is refused or a digest raises, those of none. Then each row is served
  // or, where that does not fit, left as it was.
  void take_ids(const RowAdvance* all, size_t size, int64_t num_lookahead_tokens);
  Slots advance(const RowAdvance& each, int64_t num_lookahead_tokens);

  // The same for tokens that have become known: the chain takes them, unless they do not fit. The
  // answer does not name the new blocks.
  struct KnownTokens {
    int32_t row;
    const int32_t* ids;  // null: it does not matter which
    int64_t n;           // may be 0, for lookahead slots alone
  };
  Slots append_known(const KnownTokens& tokens, int64_t num_lookahead_tokens);
  // The same of several rows in two parts. First the chains of all take their tokens; where one is
  // refused or a digest raises, those of none. Then, row after row, they get slots or go back.
  void take_known(const KnownTokens* all, size_t size, int64_t num_lookahead_tokens);
  Slots append_taken(const KnownTokens& tokens, int64_t num_lookahead_tokens);
  void give_back(const KnownTokens& tokens) { rows_[tokens.row].chain->take_back(tokens.n); }

  // Takes back the last num_tokens tokens of a row: drafts that were rejected. Their slots are the
  // row's next ones.
  void reject(int32_t row, int64_t num_tokens);

  // A row for `child`, which begins with all tokens that the row has computed, and shares its
  // blocks. Whoever writes to a shared block first gets its own: the plan copies and replaces.
  Slots fork(int32_t row, const std::shared_ptr<TokenChain>& child);

  // For rows that `allocate` gave, all of them or, where they do not fit, none: (device page, host
  // page) each, and back. A block that several of them hold moves once. To be carried out in the
  // order of the calls.
  std::optional<std::vector<BlockId>> swap_out(const std::vector<int32_t>& rows);
  std::optional<std::vector<BlockId>> swap_in(const std::vector<int32_t>& rows);
  bool is_on_host(int32_t row) const { return row_at(row).on_host; }
  bool by_step(int32_t row) const { return row_at(row).by_step; }
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const;  // that hold KV; of one tier
  // As RowSwap says. 0 slots or more, per row.
  RowSwap::BlocksBack num_blocks_back(const std::vector<int32_t>& rows,
                                      const std::vector<int64_t>& num_slots) const;

  // The first num_tokens tokens of a row that `allocate` gave have their KV now.
  void mark_computed(int32_t row, int64_t num_tokens);

  // The row's blocks were used; what that means is the eviction policy's.
  void access(int32_t row, double now);

  // Row after row: publishes what has filled since the row was last served, then releases its
  // blocks, tail first, and the row; the next step's plan clears it, if a step admitted it.
  // `features`: what the caller says of the conversations, for the eviction policy.
  // A broken manager has nothing to release.
  void free(const int32_t* rows, int64_t n, const ReleaseFeatures& features = {},
            const LeavingBlocks& blocks = {});
  void free(int32_t row, const ReleaseFeatures& features = {}) { free(&row, 1, features); }
  // Blocks that were kept under this name are released.
  void release_kept(const std::string& name);

  // The report of a worker. Completed: this step and all before it are done, what was released
  // until then can be used again. If not, the plan of this step and of every later one will not be
  // carried out, or came to nothing: what they computed leaves the cache, and the rows go back to
  // where they were. The `failed` blocks are invalidated. The next plan sends the rows' tables
  // anew. All of it or, where something is refused, nothing. `failed_on_host`: pages of the host
  // that were not written.
  Recompute report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                   const std::vector<BlockId>& failed_on_host);
  Recompute abort(int64_t step_id) { return report(step_id, /*completed=*/false, {}, {}); }

  // These blocks do not hold what they should: they and all that was computed from them leave the
  // cache, and the rows that used them go back to what is left.
  Recompute invalidate(const BlockId* ids, int64_t n);

  // The row goes on from what the device's cache has by now, if that is more than it has computed.
  // Its computed tokens.
  int64_t take_cached(int32_t row);

  // Pins, for a session, what the device's cache has of the request's full blocks; see
  // BlockPool::pin. What the session had pinned before is not any more. The number of blocks.
  int64_t pin(const std::string& session, TokenChain& chain);
  // How many of its blocks have been evicted all the same; of a session that pins nothing, none.
  int64_t unpin(const std::string& session);

  // Forgets what these blocks hold, held or free; see BlockPool::evict.
  void evict(const BlockId* ids, int64_t n);

  // Leading blocks of the row's group that as many rows hold as are running.
  int64_t num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group);

  bool reset_prefix_cache();
  // The same for one group: false, and nothing changed, while a row holds blocks of it, or loads
  // are under way.
  bool reset_group(int64_t group);

  // The weights changed: no hash of before is found again, and rows of before publish nothing more.
  void start_epoch();

  int64_t num_rows() const { return rows_.num_in_use(); }
  int64_t num_steps() const { return steps_.numbers().num_steps; }
  int64_t last_step_id() const { return steps_.numbers().last_issued; }
  int64_t num_fenced() const { return tiers_.frees().num_waiting(); }
  int64_t num_kept() const { return tiers_.frees().num_kept(); }
  int64_t num_external(int32_t row) const {  // of a receiving row
    return row_at(row).num_computed - rows_.info(row).num_hit;
  }
  bool is_receiving(int32_t row) const { return row_at(row).is_receiving; }
  int64_t num_loading() const {  // blocks
    return tiers_.host() == nullptr ? 0 : tiers_.host()->num_onboards();
  }
  const std::vector<BlockId>& blocks(int32_t row, int64_t group) const;
  int64_t num_computed_tokens(int32_t row) const { return row_at(row).num_computed; }
  // Whether the next plan sends the row's whole table.
  bool must_resend(int32_t row) const {
    rows_.at(row);
    return steps_.plan().must_resend(row);
  }

  // The pool's invariants, and that references are exactly what rows and fences hold.
  void check_invariants() const;

 private:
  std::optional<PrefixHit> partial_hit(const NewRow& asked,
                                       const std::vector<std::vector<BlockId>>& computed);
  void check_copies_taken() const;
  const Row& row_at(int32_t row) const {
    check_sound();
    return rows_.at(row);
  }

  // A call that may change something, or asks what only its thread may ask.
  struct Call {
    explicit Call(Manager* manager) : scope(&manager->guard_) { manager->tiers_.read_clock(); }
    CallGuard::Scope scope;
  };

  void take_in(const KnownTokens* all, size_t size, int64_t num_lookahead_tokens);
  template <class TokensOf, class StopOf>
  void append_to_chains(size_t size, const TokensOf& tokens_of, const StopOf& stop_of);
  Slots append_or_give_back(const KnownTokens& tokens, int64_t num_lookahead_tokens);
  std::vector<int64_t> external_hits(const StepRequest& request);

  ManagerSetup setup_;
  CallGuard guard_;
  RowTable rows_;
  Steps steps_;
  CacheTiers tiers_;
  CacheStats stats_;
  PrefixFinder finder_;
  // Whether hits of `allocate` may end inside blocks: not where a state would be copied, or a group
  // that is not cached would need zeros.
  bool copies_hits_;
  Checkpoints checkpoints_;
  Publisher publisher_;
  RequestChecks checks_;
  TokenIntake intake_;
  RowRelease release_;
  RowSwap swap_;
  RowServer server_;
  Recovery recovery_;
  SessionPins pins_;
};

}  // namespace kvcache
