// SPDX-License-Identifier: Apache-2.0
#include "core/manager/checkpoints.h"

#include <algorithm>
#include <numeric>

#include "core/groups/rules/page_rules.h"

namespace kvcache {

Checkpoints::Checkpoints(const std::vector<CacheGroup>& groups, int64_t unit,
                         int64_t hash_block_size)
    : unit_(unit), hash_block_size_(hash_block_size), interval_(unit) {
  for (const CacheGroup& group : groups) {
    num_redone_ = std::max(num_redone_, group.num_redone(/*with_partial=*/true));
    if (!group.rules->traits.updates_in_place) continue;
    has_states_ = true;
    interval_ = std::lcm(interval_, group.block_size);
  }
}

// The last token is always computed. A drafting group must also find tokens after the hit, and
// these tokens end at a hash boundary.
int64_t Checkpoints::last_hit(int64_t num_tokens) const {
  const int64_t num_hashed = num_tokens / hash_block_size_ * hash_block_size_;
  const int64_t most = std::min(num_tokens - 1, num_hashed - num_redone_);
  return std::max<int64_t>(most, 0) / unit_ * unit_;
}

int64_t Checkpoints::num_tokens_to_next(const Prompt& prompt, int64_t num_tokens) const {
  const int64_t start = prompt.num_computed;
  const int64_t stop = std::max(start, std::min(start + num_tokens, prompt.num_tokens));
  if (!has_states_ || !prompt.is_cached) return stop - start;
  if (start < prompt.num_shared && prompt.num_shared <= stop) return prompt.num_shared - start;
  const int64_t last = last_hit(prompt.num_tokens);
  const int64_t end = start < last && last <= stop ? last : stop / interval_ * interval_;
  return (end > start ? end : stop) - start;
}

}  // namespace kvcache
