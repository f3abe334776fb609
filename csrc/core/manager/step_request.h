// SPDX-License-Identifier: Apache-2.0
// The input of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/errors.h"
#include "core/hashing/token_chain.h"

namespace kvcache {

// Tokens after the hit of a request, whose KV comes from an external source.
struct ExternalTokens {
  int64_t num_tokens = 0;
  bool is_delayed = false;  // the KV arrives later, and the row is not served until then
};

// A request for a new row.
struct NewRow {
  std::shared_ptr<TokenChain> chain;
  int64_t num_tokens = kMaxSize;       // maximum after the hit, clipped to the known tokens
  int64_t max_host_blocks = kMaxSize;  // a hit with more host blocks uses none of them
  ExternalTokens external = {};
  std::optional<bool> read_cache = std::nullopt;  // overrides the setting of the chain
  int64_t num_lookahead = 0;                      // additional slots for drafts
  int64_t num_reserved_blocks = 0;                // blocks left free in addition to the watermark
  // The whole prompt is computed in one step from its own K and V. Therefore, blocks outside the
  // window at the end of the prompt are never allocated.
  bool computes_whole = false;
  int64_t num_prompt = 0;  // tokens without the output of a preempted request; 0: all known tokens
  // For `admit`: `PrefixHit::num_shared_tokens` of the lookup. Steps do this lookup themselves.
  int64_t num_shared = 0;
  bool waits_for_marks = false;  // publishes blocks when `mark_computed` reports that they have KV
  std::string_view name = {};    // for reports on misses; valid during the call

  bool reads() const { return chain->reads(read_cache); }
};

// The input of a step. Arrays for running rows have num_rows entries.
struct StepRequest {
  const int32_t* rows = nullptr;
  const int32_t* num_tokens = nullptr;
  int64_t num_rows = 0;
  const int32_t* token_ids = nullptr;  // new ids of all rows, concatenated
  int64_t num_ids = 0;                 // total number of ids
  // Number of ids per row; null: one per row, if there are ids.
  const int32_t* num_token_ids = nullptr;
  // Number of rejected tokens of the last step, per row. These tokens are removed first.
  const int32_t* num_rejected = nullptr;
  const int32_t* lookahead = nullptr;      // lookahead slots per row; null: num_lookahead
  int64_t num_lookahead = 0;               // lookahead slots per row, if `lookahead` is null
  const int32_t* swap_out_rows = nullptr;  // rows to move to the host before rows are served
  int64_t num_swap_out_rows = 0;
  std::vector<NewRow> new_rows;

  int64_t num_ids_of(int64_t i) const {  // number of new ids of a running row
    return num_token_ids != nullptr ? num_token_ids[i] : num_ids > 0;
  }
  int64_t num_rejected_of(int64_t i) const { return num_rejected == nullptr ? 0 : num_rejected[i]; }
  int64_t lookahead_of(int64_t i) const {
    return lookahead == nullptr ? num_lookahead : lookahead[i];
  }
};

// The request for one running row, from an engine that maintains its own tables.
struct RowAsk {
  int32_t row;
  int64_t num_tokens;            // slots; may be 0 with ids or lookahead slots
  int64_t num_lookahead = 0;     // additional slots for drafts
  const int32_t* ids = nullptr;  // new ids; null if their values do not matter
  int64_t num_ids = 0;           // number of ids that are appended to the chain if the row fits
  // Position at which the tokens start. Later tokens of the row are removed, and earlier tokens
  // count as computed. If unset, the tokens follow the computed tokens of the row.
  std::optional<int64_t> start = std::nullopt;
};

}  // namespace kvcache
