// SPDX-License-Identifier: Apache-2.0
// Appends new token ids, and computes the hashes of the blocks that they fill.
//
// Hashing can be interrupted. Therefore all hashes that a call needs are computed before anything
// else changes, and ids that the call does not use are removed again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hashing/token_chain.h"
#include "core/manager/publisher.h"
#include "core/manager/request_checks.h"
#include "core/manager/row_context.h"
#include "core/manager/step_request.h"

namespace kvcache {

class TokenIntake {
 public:
  TokenIntake(const RowContext& context, const Publisher* publisher, const RequestChecks* checks)
      : c_(context), publisher_(publisher), checks_(checks) {}

  // Append all ids of the call and compute the hashes that it needs. On an error or interruption,
  // remove all ids again. (Not inlined into `step`, whose loops are faster in separate functions.)
  [[gnu::noinline]] void take_in(const StepRequest& request) const {
    int64_t num_appended = 0;  // rows
    try {
      const int32_t* ids = request.token_ids;
      for (; request.num_ids > 0 && num_appended < request.num_rows; ++num_appended) {
        const int64_t n = request.num_ids_of(num_appended);
        if (n > 0) c_.row(request.rows[num_appended]).chain->append(ids, n);
        ids += n;
      }
      hash_ahead(request);
      // Checks again, because a signal handler may have appended tokens while another chain was
      // hashed.
      for (const NewRow& row : request.new_rows) checks_->check_new(*row.chain);
    } catch (...) {
      for (int64_t i = 0; i < num_appended; ++i) take_back(request, i);
      throw;
    }
  }
  void take_in(const RowAsk* asks, size_t n) const {
    size_t num_appended = 0;
    try {
      for (; num_appended < n; ++num_appended) {
        const RowAsk& ask = asks[num_appended];
        if (ask.num_ids > 0) c_.row(ask.row).chain->append(ask.ids, ask.num_ids);
      }
      hash_ahead(asks, n);
    } catch (...) {
      for (size_t i = 0; i < num_appended; ++i) take_back(asks[i]);
      throw;
    }
  }
  // Removes the ids of a row that is not served: of the i-th row of a step, or of this request.
  void take_back(const StepRequest& request, int64_t i) const {
    const int64_t n = request.num_ids_of(i);
    if (n > 0) c_.row(request.rows[i]).chain->take_back(n);
  }
  void take_back(const RowAsk& ask) const { c_.row(ask.row).chain->take_back(ask.num_ids); }

  // Computes the missing hashes. `reads`: whether they are needed for a lookup.
  void hash_ahead(TokenChain& chain, bool reads) const {
    if (must_hash(chain, reads)) chain.hashes();
  }
  // Hashes the blocks that may have been filled by tokens that arrived after the row was last
  // served.
  void hash_filled(int32_t row) const {
    if (publisher_->may_publish(row)) hash_ahead(*c_.row(row).chain, /*reads=*/false);
  }
  // Computes the hashes of all rows, which restarted rows look up, and of the dropped blocks in the
  // journal, which are known only by their hashes.
  void hash_rows() const {
    for (int32_t row : c_.rows->in_use()) hash_ahead(*c_.row(row).chain, /*reads=*/true);
    for (const StepJournal::Step& step : c_.journal->in_flight()) {
      for (const StepJournal::Dropped& each : step.dropped) hash_ahead(*each.chain, /*reads=*/true);
    }
  }

 private:
  bool must_hash(const TokenChain& chain, bool reads) const {
    return publisher_->is_enabled() && (reads || chain.write_cache()) &&
           chain.has_unhashed_blocks();
  }
  void hash_ahead(const StepRequest& request) const {
    std::vector<TokenChain*> chains;
    const auto add = [&](TokenChain& chain, bool reads) {
      if (must_hash(chain, reads)) chains.push_back(&chain);
    };
    for (int64_t i = 0; i < request.num_rows; ++i) {
      const Row& row = c_.row(request.rows[i]);
      // In most steps, a row fills no block, so its chain is not accessed.
      if (row.num_computed + request.num_tokens[i] >= row.next_publish) {
        add(*row.chain, /*reads=*/false);
      }
    }
    for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
      const int32_t row = request.swap_out_rows[i];
      if (publisher_->may_publish(row)) add(*c_.row(row).chain, /*reads=*/false);
    }
    for (const NewRow& row : request.new_rows) add(*row.chain, row.reads());
    TokenChain::hash_all(chains.data(), chains.size());
  }
  void hash_ahead(const RowAsk* asks, size_t n) const {
    std::vector<TokenChain*> chains;
    for (size_t i = 0; i < n; ++i) {
      const Row& r = c_.row(asks[i].row);
      const int64_t stop = asks[i].start.value_or(r.num_computed) + asks[i].num_tokens;
      if (stop >= r.next_publish && must_hash(*r.chain, /*reads=*/false)) {
        chains.push_back(r.chain.get());
      }
    }
    TokenChain::hash_all(chains.data(), chains.size());
  }

  RowContext c_;
  const Publisher* publisher_;
  const RequestChecks* checks_;
};

}  // namespace kvcache
