// SPDX-License-Identifier: Apache-2.0
#include "core/manager/token_intake.h"

#include <algorithm>
#include <vector>

namespace kvcache {

void TokenIntake::take_in(const StepRequest& request) const {
  append_ids(request);
  try {
    hash_ahead(request);
    // Checks again, because a signal handler may have appended tokens while another chain was
    // hashed.
    for (const NewRow& row : request.new_rows) checks_->check_new(*row.chain);
  } catch (...) {
    take_back_ids(request, request.num_rows);
    throw;
  }
}

bool TokenIntake::must_hash(const TokenChain& chain, bool reads) const {
  return publisher_->is_enabled() && (reads || chain.write_cache()) && chain.has_unhashed_blocks();
}

void TokenIntake::hash_ahead(TokenChain& chain, bool reads) const {
  if (must_hash(chain, reads)) chain.hashes();
}

void TokenIntake::hash_written(std::vector<TokenChain*> chains) const {
  const auto is_ready = [&](TokenChain* chain) { return !must_hash(*chain, /*reads=*/false); };
  chains.erase(std::remove_if(chains.begin(), chains.end(), is_ready), chains.end());
  TokenChain::hash_all(chains.data(), chains.size());
}

// Hashes the blocks that may have been filled by tokens that arrived after the row was last served.
void TokenIntake::hash_filled(int32_t row) const {
  if (publisher_->may_publish(row)) hash_ahead(*c_.row(row).chain, /*reads=*/false);
}

void TokenIntake::hash_ahead(const StepRequest& request) const {
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

void TokenIntake::append_ids(const StepRequest& request) const {
  if (request.num_ids == 0) return;
  const int32_t* ids = request.token_ids;
  int64_t i = 0;
  try {
    for (; i < request.num_rows; ++i) {
      const int64_t n = request.num_ids_of(i);
      if (n > 0) c_.row(request.rows[i]).chain->append(ids, n);
      ids += n;
    }
  } catch (...) {
    take_back_ids(request, i);
    throw;
  }
}

void TokenIntake::take_back_ids(const StepRequest& request, int64_t num_rows) const {
  for (int64_t i = 0; i < num_rows; ++i) take_back_ids_of(request, i);
}

void TokenIntake::take_back_ids_of(const StepRequest& request, int64_t i) const {
  if (request.num_ids == 0) return;
  const int64_t n = request.num_ids_of(i);
  if (n > 0) c_.row(request.rows[i]).chain->take_back(n);
}

// The hashes are needed because dropped blocks are known only by their hashes, and because
// restarted rows look up their own.
void TokenIntake::hash_rows() const {
  for (int32_t row : c_.rows->in_use()) hash_ahead(*c_.row(row).chain, /*reads=*/true);
  for (const StepJournal::Step& step : c_.journal->in_flight()) {
    for (const StepJournal::Dropped& each : step.dropped) hash_ahead(*each.chain, /*reads=*/true);
  }
}

}  // namespace kvcache
