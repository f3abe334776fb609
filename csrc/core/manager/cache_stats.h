// SPDX-License-Identifier: Apache-2.0
// Cache hit statistics, in total and over the most recent requests.
//
// A hit token is a token that a request did not have to compute, because another request had. A
// request is counted once, at its first admission that reads the cache. If it is admitted again,
// only the tokens of its hit that it has never had before are counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/hashing/token_chain.h"

namespace kvcache {

struct HitCount {
  int64_t num_requests = 0;     // admitted requests that read the cache
  int64_t query_tokens = 0;     // tokens of these requests at their first admission
  int64_t hit_tokens = 0;       // these tokens, found in the cache
  int64_t host_hit_tokens = 0;  // the hit tokens in and after the hit's first host block
};

// Counts of pages that were moved between the tiers, or were not moved.
struct TierCount {
  int64_t written_blocks = 0;      // cached blocks written to the host
  int64_t unwritten_blocks = 0;    // not written because no host page was free
  int64_t declined_blocks = 0;     // not written because too few hits were expected
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
  explicit CacheStats(std::vector<int64_t> block_sizes, int64_t window = 1000)
      : block_sizes_(std::move(block_sizes)),
        groups_(block_sizes_.size()),
        recent_(static_cast<size_t>(window)) {}

  // Whether the request was counted.
  bool has_counted(TokenChain* chain) const { return record_of(chain).is_counted; }
  // The tokens of the request that were counted as hits.
  int64_t num_hits(TokenChain* chain) const { return record_of(chain).num_hits; }
  // Counts a hit of num_hit tokens, of which those from `first_on_host` on were on the host.
  void count(TokenChain* chain, int64_t num_hit, int64_t first_on_host) {
    CountedTokens& of = record_of(chain);
    const bool is_first = !of.is_counted;
    if (is_first) {
      of.is_counted = true;
      of.number = num_counted_;
      of.num_query = chain->num_tokens();
    }
    const int64_t stop = std::min(num_hit, of.num_query), first = of.num_had;
    const HitCount one{is_first, is_first ? of.num_query : 0, std::max<int64_t>(stop - first, 0),
                       std::max<int64_t>(stop - std::max(first, first_on_host), 0)};
    if (is_first) {
      add(one);
    } else if (one.hit_tokens > 0 && of.number >= num_cleared_) {  // counted since `clear`
      add_more(of, one);
    }
    of.num_hits += one.hit_tokens;
    note_had(chain, num_hit);
  }
  // Records that the request has had its first num_tokens tokens.
  void note_had(TokenChain* chain, int64_t num_tokens) const {
    int64_t& num_had = record_of(chain).num_had;
    num_had = std::max(num_had, num_tokens);
  }
  // A fork is a part of its parent's request, which was counted.
  void note_fork(TokenChain* child, int64_t num_computed) const {
    record_of(child).is_counted = true;
    note_had(child, num_computed);
  }
  void add_stored(size_t group, int64_t num_blocks) { groups_[group].stored_blocks += num_blocks; }

  const HitCount& total() const { return total_; }
  const HitCount& window() const { return window_; }  // counts over the last `window` requests
  const std::vector<GroupCount>& groups() const { return groups_; }

  void clear() {
    total_ = window_ = {};
    std::fill(groups_.begin(), groups_.end(), GroupCount{});
    std::fill(recent_.begin(), recent_.end(), HitCount{});
    num_cleared_ = num_counted_;
  }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
  // A request may be admitted by several managers, one after another.
  CountedTokens& record_of(TokenChain* chain) const {
    CountedTokens& of = chain->counted();
    if (of.by != id_) {
      of = {};
      of.by = id_;
    }
    return of;
  }
  void add(const HitCount& one) {
    add_to(&total_, one, 1);
    add_blocks(one, 1, &groups_);
    HitCount& oldest = recent_[num_counted_++ % recent_.size()];
    add_to(&window_, oldest, -1);
    add_to(&window_, one, 1);
    oldest = one;
  }
  // Adds hits of a request that was counted earlier. The window may no longer cover it.
  void add_more(const CountedTokens& of, const HitCount& more) {
    add_to(&total_, more, 1);
    add_blocks({0, 0, of.num_hits, 0}, -1, &groups_);
    add_blocks({0, 0, of.num_hits + more.hit_tokens, 0}, 1, &groups_);
    if (num_counted_ - of.number > recent_.size()) return;
    for (HitCount* each : {&window_, &recent_[of.number % recent_.size()]}) add_to(each, more, 1);
  }
  static void add_to(HitCount* sum, const HitCount& one, int64_t sign) {
    sum->num_requests += sign * one.num_requests;
    sum->query_tokens += sign * one.query_tokens;
    sum->hit_tokens += sign * one.hit_tokens;
    sum->host_hit_tokens += sign * one.host_hit_tokens;
  }
  void add_blocks(const HitCount& one, int64_t sign, std::vector<GroupCount>* sums) const {
    for (size_t g = 0; g < block_sizes_.size(); ++g) {
      if (block_sizes_[g] == 0) continue;
      (*sums)[g].query_blocks += sign * (one.query_tokens / block_sizes_[g]);
      (*sums)[g].hit_blocks += sign * (one.hit_tokens / block_sizes_[g]);
    }
  }

  uint64_t id_ = next_id();
  uint64_t num_counted_ = 0, num_cleared_ = 0;  // requests, in all and before the last `clear`
  std::vector<int64_t> block_sizes_;
  HitCount total_, window_;
  std::vector<GroupCount> groups_;
  std::vector<HitCount> recent_;  // ring buffer
};

}  // namespace kvcache
