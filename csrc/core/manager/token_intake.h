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

  // Appends all ids of the step and computes the hashes that it needs. On an error or interruption,
  // removes all ids again. take_back_ids_of removes the ids of the i-th row.
  void take_in(const StepRequest& request) const;
  void take_back_ids_of(const StepRequest& request, int64_t i) const;

  // `reads`: whether hashes are needed for a lookup.
  void hash_ahead(TokenChain& chain, bool reads) const;
  void hash_written(std::vector<TokenChain*> chains) const;  // two chains at a time
  void hash_filled(int32_t row) const;
  void hash_rows() const;  // computes the hashes of all rows and of dropped blocks in the journal

 private:
  bool must_hash(const TokenChain& chain, bool reads) const;
  void hash_ahead(const StepRequest& request) const;
  void append_ids(const StepRequest& request) const;
  void take_back_ids(const StepRequest& request, int64_t num_rows) const;

  RowContext c_;
  const Publisher* publisher_;
  const RequestChecks* checks_;
};

}  // namespace kvcache
