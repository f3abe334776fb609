// SPDX-License-Identifier: Apache-2.0
#include "core/manager/token_intake.h"

#include <vector>

namespace kvcache {

namespace {

// Appends the ids of each row, then calls `hash`. On an error or interruption, removes the ids of
// all rows to which ids were appended.
template <class Append, class TakeBack, class Hash>
void append_ids(int64_t num_rows, const Append& append, const TakeBack& take_back,
                const Hash& hash) {
  int64_t num_appended = 0;
  try {
    for (; num_appended < num_rows; ++num_appended) append(num_appended);
    hash();
  } catch (...) {
    for (int64_t i = 0; i < num_appended; ++i) take_back(i);
    throw;
  }
}

}  // namespace

void TokenIntake::take_in(const StepRequest& request) const {
  const int32_t* ids = request.token_ids;
  append_ids(
      request.num_ids == 0 ? 0 : request.num_rows,
      [&](int64_t i) {
        const int64_t n = request.num_ids_of(i);
        if (n > 0) c_.row(request.rows[i]).chain->append(ids, n);
        ids += n;
      },
      [&](int64_t i) { take_back(request, i); },
      [&] {
        hash_ahead(request);
        // Checks again, because a signal handler may have appended tokens while another chain was
        // hashed.
        for (const NewRow& row : request.new_rows) checks_->check_new(*row.chain);
      });
}

void TokenIntake::take_in(const RowAsk* asks, int64_t num_rows) const {
  append_ids(
      num_rows,
      [&](int64_t i) {
        if (asks[i].num_ids > 0) c_.row(asks[i].row).chain->append(asks[i].ids, asks[i].num_ids);
      },
      [&](int64_t i) { take_back(asks[i]); }, [&] { hash_ahead(asks, num_rows); });
}

void TokenIntake::take_back(const StepRequest& request, int64_t i) const {
  const int64_t n = request.num_ids_of(i);
  if (n > 0) c_.row(request.rows[i]).chain->take_back(n);
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

void TokenIntake::hash_ahead(const RowAsk* asks, int64_t num_rows) const {
  std::vector<TokenChain*> chains;
  for (int64_t i = 0; i < num_rows; ++i) {
    const Row& r = c_.row(asks[i].row);
    const int64_t stop = asks[i].start.value_or(r.num_computed) + asks[i].num_tokens;
    if (stop >= r.next_publish && must_hash(*r.chain, /*reads=*/false)) {
      chains.push_back(r.chain.get());
    }
  }
  TokenChain::hash_all(chains.data(), chains.size());
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
