// Requests that cannot be meant are refused by name before anything changes.
//
// Invariant: changes nothing but which rows the call has named.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/options.h"
#include "core/manager/row_release.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/manager/step_request.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// All throw std::invalid_argument that names the argument, what came and what was expected.
class RequestChecks {
 public:
  struct Context {
    const ManagerSetup* setup;
    RowTable* rows;
    const StepJournal* journal;
    const BlockPool* pool;
    const BlockPool* host;  // null where there is none
    const DeferredFrees* frees;
  };
  explicit RequestChecks(const Context& context);

  void check_group(int64_t group) const;
  void check_length(int64_t num_total, const char* what) const {
    if (num_total > c_.setup->options.max_model_len) fail_length(num_total, what);
  }
  // Which driver admitted the row: `step`, or a caller that keeps its own tables.
  void check_driver(int32_t row, bool by_step) const {
    if (c_.rows->at(row).by_step != by_step) fail_driver(row, by_step);
  }
  void check_not_receiving(int32_t row) const {
    if ((*c_.rows)[row].is_receiving) fail_receiving(row);
  }
  // That the slots of one step leave all that it reads, where blocks are written round. `what` asks
  // for `num_slots`, lookahead included, from token `start` on.
  void check_places(int64_t start, int64_t num_slots, const char* what) const {
    if (has_circular_) check_circular(start, num_slots, what);
  }
  // Of a request whose external tokens end at `start`: its own tokens, which follow them. Of the
  // external ones the last come, as many as there are places for.
  void check_new_places(const NewRow& asked, int64_t start, int64_t lookahead) const {
    const int64_t num_tokens = std::min(asked.num_tokens, asked.chain->num_tokens() - start);
    check_places(start, num_tokens + lookahead, "a new request");
  }
  // Drafts of a running row, which has num_known tokens known: no more than states are kept for.
  void check_drafts(int32_t row, int64_t start, int64_t num_tokens, int64_t num_known) const {
    const int64_t num_sure = std::max(start + 1, num_known) - start;
    if (max_drafts_ > 0 && num_tokens > num_sure + max_drafts_)
      fail_drafts(row, num_tokens, num_sure);
  }
  void check_has_no_state(const char* call) const;
  void check_has_host(const char* what) const;
  void check_on_device(int32_t row) const {
    if (c_.rows->at(row).on_host) fail_on_host(row);
  }
  void check_ids(const std::vector<BlockId>& ids, const char* name) const;

  void check_new(const TokenChain& chain, int64_t least_tokens = 1) const;
  // Counts of a request that asks for a row; `name`: of its number of tokens.
  void check_counts(const NewRow& asked, const char* name) const;
  void check_rejected(int32_t row, int64_t num_rejected) const;
  void check_append(int32_t row, int64_t num_tokens, int64_t least,
                    int64_t num_lookahead_tokens) const;
  // Of a call that names its rows.
  void check_advance(const RowAdvance& each, int64_t num_lookahead_tokens) const;
  // Tokens that come from elsewhere, behind a hit of num_hit tokens.
  void check_external(const NewRow& asked, int64_t num_hit) const;
  void check_receive(int32_t row, int64_t num_tokens) const;
  void check_kept(const std::string& name) const;
  void check_fork(int32_t row, const TokenChain& child) const;
  void check_swap(const std::vector<int32_t>& rows, bool on_host) const;
  void check_leaving(const int32_t* rows, int64_t n, const LeavingBlocks& blocks) const;
  // The number of tokens of these blocks, which a caller has looked up.
  int64_t check_computed(const TokenChain& chain, const std::vector<std::vector<BlockId>>& computed,
                         bool reads = true) const;
  void check_step(const StepRequest& request) const;
  void check_report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                    const std::vector<BlockId>& failed_on_host) const;

 private:
  void check_departure(int32_t row, const Departure& departure) const;
  [[noreturn]] void fail_length(int64_t num_total, const char* what) const;
  [[noreturn]] static void fail_on_host(int32_t row);
  [[noreturn]] static void fail_driver(int32_t row, bool by_step);
  [[noreturn]] static void fail_receiving(int32_t row);
  [[noreturn]] void fail_drafts(int32_t row, int64_t num_tokens, int64_t num_sure) const;
  void check_step_rows(const StepRequest& request) const;
  void check_token_ids(const StepRequest& request) const;
  void check_all_transferred(int64_t num_external) const;
  void check_circular(int64_t start, int64_t num_slots, const char* what) const;

  Context c_;
  bool has_state_ = false;     // a group of pages that hold states
  int64_t max_drafts_;         // of a step of a row
  bool has_circular_ = false;  // a group of blocks that are written round
};

}  // namespace kvcache
