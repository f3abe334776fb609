// The request-level manager: rows of requests over a block pool, a whole batch per call.
//
// A row is a request's stable place in the tables. `step` decides for every asked row which blocks
// it gets; what changed in the tables leaves as one StepDelta.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "core/block_pool.h"
#include "core/token_chain.h"

namespace kvcache {

enum class Status : uint8_t { kServed = 0, kWait = 1, kNever = 2 };

struct ManagerOptions {
  int64_t block_size;
  int64_t num_blocks;     // the null block counted
  int64_t max_model_len;  // tokens
  bool enable_caching = true;
  int64_t num_preallocate_tokens = 0;
  int64_t max_num_reqs = 0;  // rows; 0: as many as needed
};

// A request that asks for a row.
struct NewRow {
  std::shared_ptr<TokenChain> chain;
  int64_t num_tokens;  // at most this many tokens beyond the hit; clipped to what the chain knows
  // Blocks the caller looked up before (allocate_slots); otherwise the step looks up itself.
  const BlockId* computed = nullptr;
  int64_t num_computed_blocks = -1;
};

// What a step answered and what it changed, ragged by row where it says so.
struct StepDelta {
  std::vector<int32_t> rows;  // per asked row, in the order asked; -1: got none
  std::vector<uint8_t> status;
  std::vector<int32_t> num_computed_tokens;  // where the row's new tokens start
  std::vector<int32_t> clear_rows;
  std::vector<int32_t> append_rows, append_splits, append_ids;
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

  // Longest run of cached full blocks from the start, at most (num_tokens - 1) / block_size blocks:
  // the last token must run. Changes nothing.
  std::vector<BlockId> lookup(TokenChain& chain) const;

  // Serves running rows, then new ones, in the order given. Throws on a request that cannot be
  // meant (unknown row, a row twice, no tokens, beyond max_model_len) before anything changes.
  StepDelta step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                 const std::vector<NewRow>& new_rows, int64_t num_lookahead_tokens);

  // Gives the row's blocks back, tail first, and the row; the next step's delta clears it.
  void free(int32_t row);

  bool reset_prefix_cache() { return pool_.reset(); }

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
  };
  struct Need {
    Status status;
    int64_t num_new;  // blocks, with preallocation
  };

  const Row& at(int32_t row) const;
  void check_running(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows);
  void check_new(const NewRow& request) const;
  void check_computed(const NewRow& request) const;
  int64_t num_after(const NewRow& request, int64_t num_computed) const;  // tokens with slots
  void check_length(int64_t num_total, const char* what) const;
  Need need(int64_t num_held, int64_t num_tokens_after, int64_t num_tokens_ever,
            int64_t num_lookahead, int64_t num_free) const;
  void serve_running(int32_t row, int64_t num_tokens, int64_t num_lookahead, StepDelta* delta);
  void serve_new(const NewRow& request, int64_t num_lookahead, StepDelta* delta);
  void append_blocks(int32_t row, int64_t num_hit, int64_t num_new, StepDelta* delta);
  void publish(Row& row);
  int32_t take_row();

  ManagerOptions options_;
  BlockPool pool_;
  std::vector<Row> rows_;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> free_rows_;
  std::vector<int32_t> clear_rows_;  // freed since the last step
  int64_t num_rows_ = 0;             // in use
  int64_t num_steps_ = 0;
  CacheStats stats_;
};

}  // namespace kvcache
