// The request-level manager: rows of requests over a block pool, a whole batch per call.
//
// A row is a request's stable place in the tables. `step` decides for every asked row which blocks
// it gets; what changed in the tables leaves as one StepDelta. `allocate` and `append` decide for
// one request of a caller that keeps its own tables. A row belongs to the face that admitted it;
// `free` serves both.
//
// A manager belongs to the thread that first uses it. Every call that changes something first
// hashes what it will need, then checks, then changes: a digest from Python may raise or call back,
// and nothing may then have been changed, or change under the call's feet.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <thread>
#include <vector>

#include "core/block_pool.h"
#include "core/token_chain.h"

namespace kvcache {

enum class Status : uint8_t { kServed = 0, kWait = 1, kNever = 2 };

struct ManagerOptions {  // each at most 2**31 - 1
  int64_t block_size;
  int64_t num_blocks;     // the null block counted
  int64_t max_model_len;  // tokens
  bool enable_caching = true;
  int64_t num_preallocate_tokens = 0;
  int64_t max_num_reqs = 0;  // rows; 0: as many as needed
};

// A request that asks a step for a row.
struct NewRow {
  std::shared_ptr<TokenChain> chain;
  int64_t num_tokens;  // at most this many tokens beyond the hit; clipped to what the chain knows
};

// What a step answered and what it changed, ragged by row where it says so.
struct StepDelta {
  std::vector<int32_t> rows;  // per asked row, in the order asked; -1: got none
  std::vector<uint8_t> status;
  std::vector<int32_t> num_computed_tokens;  // where the row's new tokens start
  std::vector<int32_t> clear_rows;
  std::vector<int32_t> append_rows, append_splits, append_ids;
};

// The answer to one request.
struct Slots {
  Status status;
  int32_t row = -1;
  std::vector<BlockId> new_blocks;
};

struct CacheStats {
  int64_t num_requests = 0;  // admitted with reading allowed
  int64_t query_tokens = 0;  // their tokens
  int64_t hit_tokens = 0;    // of those, found in the cache
};

class Manager {
 public:
  explicit Manager(const ManagerOptions& options);

  const ManagerOptions& options() const { return options_; }
  const BlockPool& pool() const { return pool_; }
  BlockPool& pool() { return pool_; }
  const CacheStats& stats() const { return stats_; }
  void clear_stats() { stats_ = {}; }

  // Makes the calling thread the owner where there is none. Throws std::runtime_error in any other
  // thread, and where another call has not returned. All calls up to `reset_prefix_cache` check it.
  void check_caller();

  const std::vector<Hash>& hashes(TokenChain& chain);

  // Longest run of cached full blocks from the start, at most (num_tokens - 1) / block_size blocks:
  // the last token must run. None where the request opted out of reading. Changes nothing.
  std::vector<BlockId> lookup(TokenChain& chain);

  // Serves running rows, then new ones, in the order given. Throws on a request that cannot be
  // meant (unknown row, a row twice, no tokens, beyond max_model_len) before anything changes.
  StepDelta step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                 const std::vector<NewRow>& new_rows, int64_t num_lookahead_tokens);

  // A row with these blocks, which the caller looked up, and slots for num_tokens tokens more.
  // `new_blocks` are without the computed ones.
  Slots allocate(const std::shared_ptr<TokenChain>& chain, int64_t num_tokens,
                 const BlockId* computed, int64_t num_computed_blocks,
                 int64_t num_lookahead_tokens);

  // Slots for num_tokens tokens more in a row that `allocate` gave.
  Slots append(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens);

  // Publishes what has filled since the row was last served, then gives the row's blocks back, tail
  // first, and the row; the next step's delta clears it, if a step admitted it.
  void free(int32_t row);

  bool reset_prefix_cache();

  int64_t num_rows() const { return num_rows_; }
  const std::vector<BlockId>& blocks(int32_t row) const { return at(row).blocks; }
  int64_t num_computed_tokens(int32_t row) const { return at(row).num_computed; }

  // The pool's invariants, and that references are exactly what the rows hold.
  void check_invariants() const;

 private:
  struct Row {
    std::shared_ptr<TokenChain> chain;  // null: the row is not in use
    std::vector<BlockId> blocks;
    int64_t num_computed = 0;   // tokens with a slot and, once the plans ran, with KV in it
    int64_t num_published = 0;  // leading blocks that are in the index
    int64_t last_step = -1;     // to notice a row that a step names twice
    bool by_step = false;       // admitted by `step`
  };
  struct Need {
    Status status;
    int64_t num_new;  // blocks, with preallocation
  };
  // One call at a time: a digest from Python could call this manager again.
  class Call {
   public:
    explicit Call(Manager* manager) : manager_(manager) {
      manager->check_caller();
      manager->in_call_ = true;
    }
    ~Call() { manager_->in_call_ = false; }
    Call(const Call&) = delete;

   private:
    Manager* manager_;
  };

  const Row& at(int32_t row) const;
  // Whether there is something to hash before the step can be served.
  bool check_step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                  const std::vector<NewRow>& new_rows);
  void check_face(int32_t row, bool by_step) const;
  void check_new(const TokenChain& chain) const;
  void check_computed(const TokenChain& chain, const BlockId* computed, int64_t n) const;
  void check_length(int64_t num_total, const char* what) const;
  bool must_hash(const TokenChain& chain, bool reads) const;
  void hash_ahead(TokenChain& chain, bool reads) const;
  void hash_ahead(const int32_t* rows, int64_t num_rows, const std::vector<NewRow>& new_rows) const;
  std::vector<BlockId> find(const TokenChain& chain) const;
  Need need(int64_t num_held, int64_t num_tokens_after, int64_t num_tokens_ever,
            int64_t num_lookahead, int64_t num_free) const;
  Need grow(Row& row, int64_t num_tokens, int64_t num_lookahead);
  Slots admit(const std::shared_ptr<TokenChain>& chain, std::vector<BlockId> hits,
              int64_t num_tokens_after, int64_t num_lookahead, bool by_step);
  void take_blocks(Row& row, int64_t num_new);
  bool may_publish(const Row& row, int64_t num_computed) const;  // were all its tokens known
  void publish(Row& row);
  int32_t take_row();

  ManagerOptions options_;
  int64_t max_blocks_;  // of one request
  int64_t num_preallocate_blocks_;
  BlockPool pool_;
  std::vector<Row> rows_;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> free_rows_;
  std::vector<int32_t> clear_rows_;  // freed since the last step
  int64_t num_rows_ = 0;             // in use
  int64_t num_steps_ = 0;
  CacheStats stats_;
  std::thread::id owner_;  // of no thread until the first call
  bool in_call_ = false;
};

}  // namespace kvcache
