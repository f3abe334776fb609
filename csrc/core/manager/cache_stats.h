// SPDX-License-Identifier: Apache-2.0
// Cache hit statistics, in total and over the most recent requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvcache {

struct HitCount {
  int64_t num_requests = 0;     // admitted requests that read the cache
  int64_t query_tokens = 0;     // tokens of these requests
  int64_t hit_tokens = 0;       // tokens found in the cache
  int64_t host_hit_tokens = 0;  // the hit tokens in and after the hit's first host block
};

// Counts of pages that were moved between the tiers, or were not moved.
struct TierCount {
  int64_t written_blocks = 0;      // cached blocks written to the host
  int64_t unwritten_blocks = 0;    // not written because no host page was free
  int64_t declined_blocks = 0;     // for kLearned: not written because too few hits were expected
  int64_t loaded_blocks = 0;       // blocks loaded from the host for hits
  int64_t swapped_out_blocks = 0;  // blocks of swapped-out rows
  int64_t swapped_in_blocks = 0;
};

// Statistics of one group, in whole blocks.
struct GroupCount {
  int64_t query_blocks = 0;   // whole blocks of all counted requests
  int64_t hit_blocks = 0;     // whole blocks within the hits, including blocks before a window
  int64_t stored_blocks = 0;  // published blocks
};

class CacheStats {
 public:
  // `block_sizes`: tokens per block, by group; 0 for a group that is not cached.
  CacheStats(std::vector<int64_t> block_sizes, int64_t window)
      : block_sizes_(std::move(block_sizes)),
        groups_(block_sizes_.size()),
        recent_(static_cast<size_t>(window)) {}

  void add(int64_t query_tokens, int64_t hit_tokens, int64_t host_hit_tokens) {
    const HitCount one{1, query_tokens, hit_tokens, host_hit_tokens};
    add_to(&total_, one, 1);
    add_blocks(one, &groups_);
    HitCount& oldest = recent_[next_];
    add_to(&window_, oldest, -1);
    add_to(&window_, one, 1);
    oldest = one;
    next_ = next_ + 1 == recent_.size() ? 0 : next_ + 1;
  }
  void add_stored(size_t group, int64_t num_blocks) { groups_[group].stored_blocks += num_blocks; }

  const HitCount& total() const { return total_; }
  const HitCount& window() const { return window_; }  // counts over the last `window` requests
  const std::vector<GroupCount>& groups() const { return groups_; }
  std::vector<GroupCount> window_groups() const {
    std::vector<GroupCount> out(block_sizes_.size());
    for (const HitCount& one : recent_) add_blocks(one, &out);
    return out;
  }

  void clear() {
    total_ = window_ = {};
    std::fill(groups_.begin(), groups_.end(), GroupCount{});
    std::fill(recent_.begin(), recent_.end(), HitCount{});
    next_ = 0;
  }

 private:
  static void add_to(HitCount* sum, const HitCount& one, int64_t sign) {
    sum->num_requests += sign * one.num_requests;
    sum->query_tokens += sign * one.query_tokens;
    sum->hit_tokens += sign * one.hit_tokens;
    sum->host_hit_tokens += sign * one.host_hit_tokens;
  }
  void add_blocks(const HitCount& one, std::vector<GroupCount>* sums) const {
    for (size_t g = 0; g < block_sizes_.size(); ++g) {
      if (block_sizes_[g] == 0) continue;
      (*sums)[g].query_blocks += one.query_tokens / block_sizes_[g];
      (*sums)[g].hit_blocks += one.hit_tokens / block_sizes_[g];
    }
  }

  std::vector<int64_t> block_sizes_;
  HitCount total_, window_;
  std::vector<GroupCount> groups_;
  std::vector<HitCount> recent_;  // ring buffer
  size_t next_ = 0;
};

}  // namespace kvcache
