// Token ids that came, and the hashes of the blocks that they fill, before anything else changes.
//
// A digest from Python may raise, or call back: what a call will need is hashed ahead, and ids that
// it does not come to use are taken back.
#pragma once

#include <cstdint>

#include "core/hashing/token_chain.h"
#include "core/manager/publisher.h"
#include "core/manager/row_table.h"
#include "core/manager/step_journal.h"
#include "core/manager/step_request.h"

namespace kvcache {

class TokenIntake {
 public:
  TokenIntake(const RowTable* rows, const Publisher* publisher, const StepJournal* journal,
              bool enable_caching)
      : rows_(rows), publisher_(publisher), journal_(journal), is_enabled_(enable_caching) {}

  // The step's ids, all of them or, where one is refused, none; of all rows or the i-th, back
  // again.
  void append_ids(const StepRequest& request) const;
  void take_back_ids(const StepRequest& request, int64_t num_rows) const;
  void take_back_ids_of(const StepRequest& request, int64_t i) const;

  // `reads`: whether hashes are needed to look something up.
  void hash_ahead(TokenChain& chain, bool reads) const;
  void hash_ahead(const StepRequest& request) const;
  void hash_filled(int32_t row) const;
  void hash_rows() const;  // all, and those that have left rows in flight

 private:
  bool must_hash(const TokenChain& chain, bool reads) const;

  const RowTable* rows_;
  const Publisher* publisher_;
  const StepJournal* journal_;
  bool is_enabled_;
};

}  // namespace kvcache
