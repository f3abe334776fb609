// SPDX-License-Identifier: Apache-2.0
// A cache group of a manager: its attention kind and its sizes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/groups/attention_kind.h"

namespace kvcache {

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
inline constexpr size_t kMaxGroups = 32;  // the maximum number of groups in one kernel launch

// Does not overflow for sizes up to kMaxSize.
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lengths, in tokens, of the hits for which the blocks of a request stay cached; 0: unused entry.
using RetainedEnds = std::array<int64_t, 6>;

struct CacheGroup {
  std::shared_ptr<const AttentionKind> kind;
  const PageRules* rules;
  bool keeps_all;
  // false: its blocks are never hit, and it does not limit the hits of other groups
  bool is_cached;
  bool is_transferred;  // false: no connector reads or writes its blocks
  bool drafts;          // the last block of a hit is recomputed
  bool has_partial;     // hits may end inside a block, which is then copied
  uint8_t id;           // index of the group, also stored with its blocks in the pool
  int64_t block_size;   // tokens, over all context-parallel ranks
  int64_t num_hashes;   // per block
  int64_t hit_unit;     // tokens; hits of the manager end at multiples of this number
  // tokens; blocks stay cached for hits that end at multiples of this number, by default hit_unit.
  // 0: blocks stay cached only for the ends that are retained for each request
  int64_t retained_every;
  int64_t max_blocks;       // maximum per request; circular: the size of the buffer
  int64_t num_places;       // maximum number of tokens with slots per row, or kUnbounded
  int64_t num_prealloc;     // blocks
  int64_t num_speculative;  // for states: drafts per step that may be rejected

  // Whether the blocks stay cached for all hits.
  bool is_dense() const { return keeps_all || retained_every == hit_unit; }
  // Returns the length of the shortest retained hit with at least num_tokens tokens, or kUnbounded
  // if there is none.
  int64_t first_retained(int64_t num_tokens, const RetainedEnds& ends) const {
    return first_retained(num_tokens, ends, retained_every);
  }
  // Like the function above, with hits retained at multiples of `every` tokens; 0: only at `ends`.
  static int64_t first_retained(int64_t num_tokens, const RetainedEnds& ends, int64_t every) {
    int64_t first = every == 0 ? kUnbounded : ceil_div(num_tokens, every) * every;
    for (int64_t end : ends) {
      if (end >= num_tokens) first = std::min(first, end);
    }
    return first;
  }
  bool is_retained(int64_t hit, const RetainedEnds& ends) const {
    return hit > 0 && first_retained(hit, ends) == hit;
  }
  // Whether a retained hit can read this whole block or must recompute it for a drafter. Only the
  // shortest hit that ends after the block is checked, because longer hits read no earlier tokens.
  bool may_be_hit(int64_t block, const RetainedEnds& ends) const {
    if (keeps_all) return true;
    const int64_t end = (block + 1) * block_size;
    if (first_needed_token(first_retained(end, ends)) < end) return true;
    return drafts && (is_retained(end - num_redone(/*with_partial=*/true), ends) ||
                      is_retained(end - num_redone(/*with_partial=*/false), ends));
  }
  // Whether a hit at one of `ends` reads this whole block.
  bool is_read_at(int64_t block, const RetainedEnds& ends) const {
    const int64_t end = (block + 1) * block_size;
    return first_needed_token(first_retained(end, ends, 0)) < end;
  }
  // Whether a retained hit can read the part of a block that ends after num_tokens tokens.
  bool may_hit_part(int64_t num_tokens, const RetainedEnds& ends) const {
    return is_dense() || is_retained(num_tokens, ends) ||
           (drafts && is_retained(num_tokens - block_size / num_hashes, ends));
  }

  // The number of tokens after a hit that the group must also find in the cache, although they are
  // recomputed.
  int64_t num_redone(bool with_partial) const {
    if (!drafts || !is_cached) return 0;
    return with_partial && has_partial ? block_size / num_hashes : block_size;
  }

  // The result is clamped, because a user-defined attention kind may return any number.
  int64_t first_needed_token(int64_t num_computed) const {
    return keeps_all ? 0
                     : std::clamp<int64_t>(kind->first_needed_token(num_computed), 0, num_computed);
  }
  // Whether slots up to `stop` can be written without overwriting a token that the token at `start`
  // reads.
  bool has_places_for(int64_t start, int64_t stop) const {
    return stop - first_needed_token(start) <= num_places;
  }
  // The first block that is still needed after num_computed tokens.
  int64_t first_needed_block(int64_t num_computed) const {
    return keeps_all ? 0 : first_needed_token(num_computed) / block_size;
  }
  // The first token whose KV a hit of num_hit tokens provides. For a group that is not cached, this
  // is num_hit, because its rows read only KV that they have computed themselves.
  int64_t first_hit_token(int64_t num_hit) const {
    return is_cached ? first_needed_token(num_hit) : num_hit;
  }
  int64_t first_hit_block(int64_t num_hit) const { return first_hit_token(num_hit) / block_size; }
  // The index of the hash that identifies this whole block.
  int64_t hash_index(int64_t block) const { return (block + 1) * num_hashes - 1; }
};

// Whether the blocks of all groups have the size of one hash block.
inline bool are_uniform(const std::vector<CacheGroup>& groups) {
  return std::all_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.num_hashes == 1; });
}

// Whether any cached group keeps all tokens, so that hits follow its chains of blocks.
inline bool has_chains(const std::vector<CacheGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.is_cached && group.keeps_all; });
}

}  // namespace kvcache
