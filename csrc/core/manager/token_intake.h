// SPDX-License-Identifier: Apache-2.0
// Appends new token ids, and computes the hashes of the blocks that they fill, before anything else
// changes.
//
// Hashing can be interrupted. Therefore all hashes that a call needs are computed in advance, and
// ids that the call does not use are removed again. Hashes computed by the engine are read when
// their tokens arrive.
#pragma once

#include <cstdint>

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

  // Appends all ids of the call and computes the hashes that it needs. On an error or interruption,
  // removes all ids again.
  void take_in(const StepRequest& request) const;
  void take_in(const RowAsk* asks, int64_t num_rows) const;
  // Removes the ids of a row that is not served: of the i-th row of a step, or of this request.
  void take_back(const StepRequest& request, int64_t i) const;
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
  void hash_rows() const;  // computes the hashes of all rows and of dropped blocks in the journal

 private:
  bool must_hash(const TokenChain& chain, bool reads) const {
    return publisher_->is_enabled() && (reads || chain.write_cache()) &&
           chain.has_unhashed_blocks();
  }
  void hash_ahead(const StepRequest& request) const;
  void hash_ahead(const RowAsk* asks, int64_t num_rows) const;

  RowContext c_;
  const Publisher* publisher_;
  const RequestChecks* checks_;
};

}  // namespace kvcache
