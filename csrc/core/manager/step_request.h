// The request to a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/hashing/token_chain.h"
#include "core/limits.h"

namespace kvcache {

// A request that asks a step for a row.
struct NewRow {
  std::shared_ptr<TokenChain> chain;
  int64_t num_tokens;  // at most this many tokens beyond the hit; clipped to what the chain knows
  int64_t max_host_blocks =
      kMaxSize;              // a hit that takes more from the host is not taken from there
  int64_t num_external = 0;  // tokens behind the hit whose KV comes from elsewhere
  bool receives = false;     // their KV comes later: until then the row is not served
  std::optional<bool> read_cache = std::nullopt;  // of this call, else the chain's

  bool reads() const { return chain->reads(read_cache); }
};

// The use that a new row makes of blocks that earlier rows of the same step fill.
enum class InStepHits : uint8_t {
  kNone = 0,   // computes their tokens, too
  kWait = 1,   // waits one step, and hits them
  kShare = 2,  // reads them: the worker computes the rows so that they are filled by then
};

// The request to a step. Arrays of running rows have num_rows entries.
struct StepRequest {
  const int32_t* rows = nullptr;
  const int32_t* num_tokens = nullptr;
  int64_t num_rows = 0;
  const int32_t* token_ids = nullptr;      // that became known, row after row
  int64_t num_ids = 0;                     // of all rows
  const int32_t* num_token_ids = nullptr;  // per row; null with ids: one each
  const int32_t* num_rejected = nullptr;   // tokens of the row's last step to take back first
  const int32_t* lookahead = nullptr;      // per served, then per new row; null: num_lookahead
  int64_t num_lookahead = 0;               // tokens
  const int32_t* swap_out_rows = nullptr;  // that leave for the host, before others are served
  int64_t num_swap_out_rows = 0;
  std::vector<NewRow> new_rows;
  int64_t num_reserved_blocks = 0;  // that new rows leave free, besides the watermark
  InStepHits in_step_hits = InStepHits::kNone;

  int64_t num_ids_of(int64_t i) const {  // of running rows
    return num_token_ids != nullptr ? num_token_ids[i] : num_ids > 0;
  }
  int64_t lookahead_of(int64_t i) const {
    return lookahead == nullptr ? num_lookahead : lookahead[i];
  }
  int64_t lookahead_of_new(size_t i) const {
    return lookahead_of(num_rows + static_cast<int64_t>(i));
  }
};

// A call of the engine that computes a row's tokens [start, stop): tokens from `start` on that the
// row has are taken back, and those before it are computed. `ids` have become known.
struct RowAdvance {
  int32_t row;
  int64_t start, stop;
  const int32_t* ids;
  int64_t num_ids;
};

}  // namespace kvcache
