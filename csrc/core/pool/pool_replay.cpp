// SPDX-License-Identifier: Apache-2.0
#include "core/pool/pool_replay.h"

#include <algorithm>
#include <vector>

namespace kvcache {

namespace {

class Replay {
 public:
  Replay(BlockPool* pool, const Hash* hashes, const int64_t* ends)
      : pool_(*pool), hashes_(hashes), ends_(ends) {}

  // Returns the number of hit blocks.
  int64_t serve(const ReplayedRequest& request) {
    const Hash* hashes = hashes_ + request.first;
    const int64_t num_held = std::min(request.num_held, pool_.num_total());
    const int64_t num_full = std::min(request.num_full, num_held);
    if (ids_.size() < static_cast<size_t>(num_held)) ids_.resize(num_held);
    pool_.set_now(request.start_ms);
    const int64_t num_hits =
        pool_.lookup(hashes, std::min(request.num_hittable, num_full), 0, true, ids_.data());
    pool_.retain(ids_.data(), num_hits);
    if (pool_.has_policy()) pool_.hit(ids_.data(), num_hits);
    pool_.allocate(num_held - num_hits, ids_.data() + num_hits);
    publish(hashes, num_hits, num_full);
    release(request, num_hits, num_held);
    return num_hits;
  }

 private:
  void publish(const Hash* hashes, int64_t first, int64_t stop) {
    const Hash none{};
    Content content{hashes + first, first == 0 ? &none : hashes + first - 1};
    content.root = hashes;
    content.begins_chain = first == 0;
    if (first > 0) content.before = ids_[first - 1];
    pool_.publish(ids_.data() + first, content, stop - first, 0);
  }
  void release(const ReplayedRequest& request, int64_t num_hits, int64_t num_held) {
    std::reverse(ids_.begin(), ids_.begin() + num_held);
    pool_.set_now(request.end_ms);
    ++num_releases_;
    if (pool_.has_policy()) {
      const int64_t* ends = ends_ + request.first;
      ends_held_.assign(ends, ends + num_held);
      std::reverse(ends_held_.begin(), ends_held_.end());
      ReleaseFeatures features;
      features.num_prefix_tokens = num_hits == 0 ? 0 : ends[num_hits - 1];
      features.num_new_blocks = num_held - num_hits;
      features.num_output_tokens = request.num_output_tokens;
      features.logical_time = num_releases_;
      features.wall_ms = request.end_ms;
      features.tokens_per_block = request.tokens_per_block;
      pool_.notify_release(ids_.data(), ends_held_.data(), num_held, features);
    }
    pool_.release(ids_.data(), num_held);
  }

  BlockPool& pool_;
  const Hash* hashes_;
  const int64_t* ends_;
  std::vector<BlockId> ids_;
  std::vector<int64_t> ends_held_;  // ends of the released blocks
  int64_t num_releases_ = 0;
};

}  // namespace

ReplayedHits replay_requests(BlockPool* pool, const ReplayedRequest* requests, int64_t n,
                             const Hash* hashes, const int64_t* ends, int64_t most_blocks) {
  Replay replay(pool, hashes, ends);
  ReplayedHits found;
  for (int64_t i = 0; i < n; ++i) {
    if (requests[i].num_blocks > most_blocks) continue;
    found.num_hittable += requests[i].num_hittable;
    found.num_hits += replay.serve(requests[i]);
  }
  return found;
}

}  // namespace kvcache
