// How much of what was asked for was found: in total, and over the last requests.
#pragma once

#include <cstdint>
#include <vector>

namespace kvcache {

struct HitCount {
  int64_t num_requests = 0;  // admitted with reading allowed
  int64_t query_tokens = 0;  // their tokens
  int64_t hit_tokens = 0;    // of those, found in the cache
};

struct GroupCount {
  int64_t hit_blocks = 0;     // taken from the cache
  int64_t stored_blocks = 0;  // published
};

class CacheStats {
 public:
  CacheStats(size_t num_groups, int64_t window)
      : groups_(num_groups), recent_(static_cast<size_t>(window)) {}

  void add(int64_t query_tokens, int64_t hit_tokens) {
    add_to(&total_, {1, query_tokens, hit_tokens}, 1);
    HitCount& oldest = recent_[next_];
    add_to(&window_, oldest, -1);
    oldest = {1, query_tokens, hit_tokens};
    add_to(&window_, oldest, 1);
    next_ = next_ + 1 == recent_.size() ? 0 : next_ + 1;
  }
  GroupCount& group(size_t g) { return groups_[g]; }

  const HitCount& total() const { return total_; }
  const HitCount& window() const { return window_; }  // the last `window` requests
  const std::vector<GroupCount>& groups() const { return groups_; }

  void clear() { *this = CacheStats(groups_.size(), static_cast<int64_t>(recent_.size())); }

 private:
  static void add_to(HitCount* sum, const HitCount& one, int64_t sign) {
    sum->num_requests += sign * one.num_requests;
    sum->query_tokens += sign * one.query_tokens;
    sum->hit_tokens += sign * one.hit_tokens;
  }
  HitCount total_, window_;
  std::vector<GroupCount> groups_;
  std::vector<HitCount> recent_;  // a ring
  size_t next_ = 0;
};

}  // namespace kvcache
