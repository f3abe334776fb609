#include "core/manager/checkpoints.h"

#include <algorithm>
#include <numeric>

namespace kvcache {

Checkpoints::Checkpoints(const std::vector<CacheGroup>& groups, int64_t unit)
    : unit_(unit), interval_(unit) {
  for (const CacheGroup& group : groups) {
    if (!group.holds_state()) continue;
    has_states_ = true;
    interval_ = std::lcm(interval_, group.block_size);
  }
}

int64_t Checkpoints::num_tokens_to_next(const Prompt& prompt, int64_t num_tokens) const {
  const int64_t start = prompt.num_computed;
  const int64_t stop = std::max(start, std::min(start + num_tokens, prompt.num_tokens));
  if (!has_states_ || !prompt.is_cached) return stop - start;
  if (start < prompt.num_shared && prompt.num_shared <= stop) return prompt.num_shared - start;
  // An equal prompt hits all its tokens but the last.
  const int64_t last = stop == prompt.num_tokens ? (stop - 1) / unit_ * unit_ : 0;
  const int64_t end = std::max(stop / interval_ * interval_, last);
  return (end > start ? end : stop) - start;
}

}  // namespace kvcache
