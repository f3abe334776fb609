// One cache group of a manager: its attention kind and its sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/groups/attention_kind.h"
#include "core/hash.h"

namespace kvcache {

inline constexpr size_t kMaxGroups = 32;  // the number that an op takes in one launch

// Cannot overflow for sizes within kMaxSize.
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct CacheGroup {
  std::shared_ptr<const AttentionKind> kind;
  AttentionKind::Pages pages;
  bool keeps_all;
  bool is_cached;           // its blocks can be hit; else it takes no part in hits
  bool is_transferred;      // else no connector reads or writes its blocks
  bool drafts;              // the last block of a hit is computed anew
  bool has_partial;         // hits inside a block, which are copied
  uint8_t id;               // index among the groups, and group of its blocks in the pool
  int64_t block_size;       // tokens, over all context-parallel ranks
  int64_t num_hashes;       // per block
  int64_t hit_unit;         // tokens: hits of the manager end at multiples of it
  int64_t max_blocks;       // of one request; circular: all that it ever has
  int64_t num_prealloc;     // blocks
  int64_t num_speculative;  // of states: drafts of a step that may be rejected

  bool holds_tokens() const { return pages == AttentionKind::Pages::kTokens; }
  bool holds_state() const { return pages == AttentionKind::Pages::kState; }
  bool holds_encoder() const { return pages == AttentionKind::Pages::kEncoder; }
  bool is_circular() const { return pages == AttentionKind::Pages::kCircular; }

  // Whether some hit reads this whole block, or computes it anew: the shortest that ends behind it
  // reads most of it.
  bool may_be_hit(int64_t block) const {
    if (keeps_all) return true;
    const int64_t end = (block + 1) * block_size;
    if (first_needed_token(ceil_div(end, hit_unit) * hit_unit) < end) return true;
    const int64_t hit = end - (has_partial ? hit_unit : block_size);
    return drafts && hit > 0 && hit % hit_unit == 0;
  }

  // Tokens behind a hit that the group finds, too, and that are computed anew.
  int64_t num_redone(bool with_partial) const {
    if (!drafts || !is_cached) return 0;
    return with_partial && has_partial ? block_size / num_hashes : block_size;
  }

  // A user's own kind may return any number, so it is clamped.
  int64_t first_needed_token(int64_t num_computed) const {
    return keeps_all ? 0
                     : std::clamp<int64_t>(kind->first_needed_token(num_computed), 0, num_computed);
  }
  // Circular: the place of a block of the sequence, and the tokens that there are places for.
  int64_t column_of(int64_t block) const { return is_circular() ? block % max_blocks : block; }
  int64_t num_places() const { return max_blocks * block_size; }
  // Circular: whether slots up to `stop` leave all that the token at `start` reads.
  bool has_places_for(int64_t start, int64_t stop) const {
    return stop - first_needed_token(start) <= num_places();
  }
  // Blocks before this one hold no token that is still read.
  int64_t first_needed_block(int64_t num_computed) const {
    return keeps_all ? 0 : first_needed_token(num_computed) / block_size;
  }
  // The first token whose KV a hit of so many tokens brings; behind it, a group that is not cached
  // reads only what its request has computed.
  int64_t first_hit_token(int64_t num_hit) const {
    return is_cached ? first_needed_token(num_hit) : num_hit;
  }
  int64_t first_hit_block(int64_t num_hit) const { return first_hit_token(num_hit) / block_size; }
};

// Drafts of a step that may be rejected in all groups of states; 0 without such groups.
inline int64_t max_drafts(const std::vector<CacheGroup>& groups) {
  int64_t most = -1;
  for (const CacheGroup& group : groups) {
    if (!group.holds_state()) continue;
    most = most < 0 ? group.num_speculative : std::min(most, group.num_speculative);
  }
  return std::max<int64_t>(most, 0);
}

// Whether all blocks are of one size, that of a hash block.
inline bool are_uniform(const std::vector<CacheGroup>& groups) {
  return std::all_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.num_hashes == 1; });
}

}  // namespace kvcache
