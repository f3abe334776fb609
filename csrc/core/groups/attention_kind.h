// A kind of attention, for the cache: which earlier tokens it still reads.
//
// From that one function follow both what may be dropped while a request runs, and which blocks
// must be found for a prefix to be a hit: those that the tokens behind it read.
#pragma once

#include <cstdint>

namespace kvcache {

class AttentionKind {
 public:
  // The content of a page of the group.
  enum class Pages {
    kTokens,   // KV of block_size tokens: one page per block of tokens that are still read
    kState,    // the state after the last token of its block: one page, and one per boundary stored
    kEncoder,  // KV of encoder tokens: taken at admission, released at the end, never shared
    kCircular,  // KV of the last `buffer` tokens, in blocks that are written round: never cached
  };

  virtual ~AttentionKind() = default;

  // The first token that is read by the token at `num_computed_tokens`, or by any after it: at
  // least 0, at most `num_computed_tokens`, and never less for more computed tokens.
  virtual int64_t first_needed_token(int64_t num_computed_tokens) const = 0;

  // Whether that is 0 always.
  virtual bool keeps_all() const { return false; }

  virtual Pages pages() const { return Pages::kTokens; }

  // kState: drafts of a step whose states a row has pages for, so that they can be rejected.
  virtual int64_t num_speculative_blocks() const { return 0; }

  // kCircular: the most tokens from the first that a step reads to the last that it writes.
  virtual int64_t buffer() const { return 0; }
};

}  // namespace kvcache
