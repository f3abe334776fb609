// Token ids that came, and the hashes of the blocks that they fill, before anything else changes.
//
// A digest from Python may raise, or call back: what a call will need is hashed ahead, and ids that
// it does not come to use are taken back. Hashes that the engine gives come with the ids.
#pragma once

#include <cstdint>

#include "core/hashing/token_chain.h"
#include "core/manager/publisher.h"
#include "core/manager/request_checks.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/manager/step_request.h"

namespace kvcache {

class TokenIntake {
 public:
  struct Context {
    const RowTable* rows;
    const Publisher* publisher;
    const StepJournal* journal;
    const RequestChecks* checks;
  };
  TokenIntake(const Context& context, bool enable_caching)
      : c_(context), is_enabled_(enable_caching) {}

  // All ids of the step, and the hashes that it needs; where one is refused or a digest raises,
  // none of the ids. The ids of its i-th row, back again.
  void take_in(const StepRequest& request) const;
  void take_back_ids_of(const StepRequest& request, int64_t i) const;

  // `reads`: whether hashes are needed to look something up.
  void hash_ahead(TokenChain& chain, bool reads) const;
  void hash_filled(int32_t row) const;
  void hash_rows() const;  // all, and those that have left rows in flight

 private:
  bool must_hash(const TokenChain& chain, bool reads) const;
  void hash_ahead(const StepRequest& request) const;
  void append_ids(const StepRequest& request) const;
  void take_back_ids(const StepRequest& request, int64_t num_rows) const;

  Context c_;
  bool is_enabled_;
};

}  // namespace kvcache
