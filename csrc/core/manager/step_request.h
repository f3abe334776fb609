// The input of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/hashing/token_chain.h"
#include "core/limits.h"

namespace kvcache {

// A request for a new row.
struct NewRow {
  std::shared_ptr<TokenChain> chain;
  int64_t num_tokens =
      kMaxSize;  // maximum number of tokens after the hit, clipped to the known tokens
  int64_t max_host_blocks = kMaxSize;  // a hit with more host blocks uses none of them
  int64_t num_external = 0;            // tokens after the hit whose KV comes from elsewhere
  bool receives = false;               // their KV arrives later; until then, the row is not served
  std::optional<bool> read_cache = std::nullopt;  // overrides the setting of the chain
  bool takes_all = false;           // `admit`: computes all known tokens instead of num_tokens
  int64_t num_lookahead = 0;        // additional slots for drafts
  int64_t num_reserved_blocks = 0;  // blocks left free in addition to the watermark
  // The whole prompt is computed at once from its own K and V. The row therefore never holds blocks
  // that are outside the window at the end of the prompt.
  bool computes_whole = false;
  // Blocks are published when `mark_computed` reports that their tokens have KV, not when they are
  // filled.
  bool waits_for_marks = false;

  bool reads() const { return chain->reads(read_cache); }
};

// How a new row uses blocks that earlier rows of the same step fill.
enum class InStepHits : uint8_t {
  kNone = 0,   // not at all: it computes their tokens itself
  kWait = 1,   // waits for the next step, and hits them
  kShare = 2,  // reads them; the worker must run the rows in an order that fills them first
};

// The input of a step. Arrays for running rows have num_rows entries.
struct StepRequest {
  const int32_t* rows = nullptr;
  const int32_t* num_tokens = nullptr;
  int64_t num_rows = 0;
  const int32_t* token_ids = nullptr;      // new ids of all rows, concatenated
  int64_t num_ids = 0;                     // total number of ids
  const int32_t* num_token_ids = nullptr;  // ids per row; null: one per row, if there are ids
  const int32_t* num_rejected = nullptr;   // tokens of the last step to take back first, per row
  const int32_t* lookahead = nullptr;      // lookahead slots per row; null: num_lookahead
  int64_t num_lookahead = 0;               // lookahead slots
  const int32_t* swap_out_rows = nullptr;  // rows to move to the host before rows are served
  int64_t num_swap_out_rows = 0;
  std::vector<NewRow> new_rows;
  InStepHits in_step_hits = InStepHits::kNone;

  int64_t num_ids_of(int64_t i) const {  // of a running row
    return num_token_ids != nullptr ? num_token_ids[i] : num_ids > 0;
  }
  int64_t lookahead_of(int64_t i) const {
    return lookahead == nullptr ? num_lookahead : lookahead[i];
  }
};

// The request for one running row, from an engine that keeps its own tables.
struct RowAsk {
  int32_t row;
  int64_t num_tokens;            // slots; may be 0 with ids or lookahead slots
  int64_t num_lookahead = 0;     // additional slots for drafts
  const int32_t* ids = nullptr;  // new ids; null: their values do not matter
  int64_t num_ids = 0;           // ids that the chain takes, unless the row does not fit
  // Where the tokens start: later tokens of the row are taken back, and earlier ones are computed.
  // If unset, the tokens follow the computed tokens of the row.
  std::optional<int64_t> start = std::nullopt;
};

}  // namespace kvcache
