// SPDX-License-Identifier: Apache-2.0
// Evicts the blocks that are least worth keeping, based on the observed reuse of similar blocks.
//
// The blocks that a request releases form segments. Blocks shared with other conversations and
// blocks used only by the request's own conversation are in different segments. Segments with
// similar features are assigned to the same class. For a sample of blocks, cached or not, the
// policy records when they are released and when they are used again. From these records, the
// policy estimates the value of a block for each class and age. The policy chooses the oldest or
// youngest segment of the class with the lowest value, and evicts all its blocks, deepest first,
// before it chooses the next. Ages are measured on the caller's clock, so the same calls at the
// same times cause the same evictions. While there are too few records to assess the oldest
// segments, the oldest segment is evicted first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/eviction/given_priority.h"
#include "core/eviction/learned/end_blocks.h"
#include "core/eviction/learned/eviction_policy.h"
#include "core/eviction/learned/levels.h"
#include "core/eviction/learned/lru_guard.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/state_budget.h"

namespace kvcache {

class Learned : public EvictionPolicy {
 public:
  // `double_cost_tokens`: prefix length after which a block costs twice as much to recompute as the
  // first block, and is worth twice as much; 0: all blocks cost the same. `tenant_share`: fraction
  // of the blocks that requests with the same cache salt may keep while other requests need space;
  // 1: no limit. `state_share`: fraction of the blocks that idle states and window blocks may keep
  // while other requests need space; 1: no limit.
  Learned(int64_t num_blocks, double double_cost_tokens, double tenant_share = 1,
          double state_share = 1)
      : num_blocks_(num_blocks),
        double_cost_tokens_(double_cost_tokens),
        model_(std::make_shared<ReuseModel>(num_blocks)),
        guard_(num_blocks, model_.get()),
        levels_(num_blocks, model_.get(), tenant_share),
        budget_(num_blocks, state_share) {}

  // Shared with the policy of another tier, which then learns from the same releases.
  const std::shared_ptr<ReuseModel>& model() const { return model_; }

  void compare_requests(int64_t num_host_blocks) override {
    guard_.compare_requests(num_blocks_, num_host_blocks);
  }
  SimulatedCache* simulated() override { return guard_.simulated(); }
  void insert(BlockId id) override {
    levels_.of(id).segments.insert(id);
    if (budget_.is_limited()) add_to_budget(id);
  }
  void remove(BlockId id) override {
    levels_.of(id).segments.remove(id);
    if (budget_.is_limited()) budget_.remove(id);
  }
  BlockId choose() override {
    const BlockId state =
        budget_.victim([&](BlockId id, int64_t num_hit) { return worth_of_state(id, num_hit); });
    return state != kNullBlock ? state : levels_.victim();
  }

  void on_publish(BlockId, const Hash* hash, uint8_t group, bool is_first) override {
    if (hash == nullptr) return;
    const uint32_t key = ReuseModel::key_of(*hash, group);
    if (is_side(group)) {
      // A recomputed window block or state does not count as a missed hit.
      if (simulated() != nullptr) guard_.note_use(key, /*is_hit=*/false);
      return;
    }
    // If another block still caches this content, its recomputation was not caused by an eviction.
    if (is_first) guard_.note_use(key, /*is_hit=*/false);
    model_->note_use(key);
  }
  void on_hit(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      const Block* block = view().blocks.find(ids[i]);
      if (block == nullptr) continue;
      const uint32_t key = ReuseModel::key_of(block->hash, block->group);
      model_->note_use(key);
      const bool is_side = this->is_side(block->group);
      if (!is_side || simulated() != nullptr) guard_.note_use(key, /*is_hit=*/true);
      if (is_side) note_side_hit(ids[i], key);
    }
  }
  void on_retain(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) {
      note_side(ids[i]);
      if (budget_.is_limited()) budget_.set_hit(ids[i], kUnknownHit);
      levels_.of(ids[i]).assign_loose(ids[i], ReuseClass::kLikely, model_->clock());
      const Block* block = view().blocks.find(ids[i]);
      if (block == nullptr || simulated() == nullptr) continue;
      guard_.note_loose(ReuseModel::key_of(block->hash, block->group), ReuseClass::kLikely);
    }
  }
  void on_release_ends(const BlockId* ids, const int64_t* hit_ends, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) add_end(ids[i], hit_ends[i]);
  }
  void on_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                  const ReleaseFeatures& features) override {
    if (!features.is_chain) {
      for (int64_t i = 0; i < n; ++i) {
        if (ids[i] != kNullBlock && view().blocks.find(ids[i]) != nullptr) {
          add_end(ids[i], EndBlocks::kHeld);
        }
      }
      return;
    }
    if (chain_.size() < static_cast<size_t>(n)) chain_.resize(n);
    num_in_chain_ = 0;
    bool is_sorted = true;
    int64_t end = 0;  // end of the previous block
    for (int64_t i = n - 1; i >= 0; --i) {
      if (i >= kPrefetchBlocks) prefetch(ids[i - kPrefetchBlocks]);
      const Block* block = view().blocks.find(ids[i]);
      // Candidates are not held by any request, so no request can release them.
      if (block == nullptr || levels_.of(ids[i]).segments.is_candidate(ids[i])) continue;
      Released& last = chain_[num_in_chain_];
      last = {prefix_tokens[i], ids[i], ReuseModel::key_of(block->hash, block->group)};
      is_sorted &= last.prefix_tokens > end;
      end = prefix_tokens[i];
      ++num_in_chain_;
    }
    if (num_in_chain_ == 0) return ends_.clear();
    if (!is_sorted) std::sort(chain_.begin(), chain_.begin() + num_in_chain_);
    model_->set_now(features.wall_ms);
    ends_.sort();
    release_chain(features);
    ends_.clear();
    model_->learn();
  }
  void on_idle(BlockId id) override {
    const Block* block = view().blocks.find(id);
    const uint32_t key = block == nullptr ? 0 : ReuseModel::key_of(block->hash, block->group);
    if (!levels_.told().take_told(id)) assign_unreported(id, block, key);
    if (block != nullptr) guard_.note_idle(key);
  }
  void on_forget(BlockId id, const Hash* hash, uint8_t group, bool evicted) override {
    if (!evicted && hash != nullptr) guard_.forget(ReuseModel::key_of(*hash, group));
    levels_.forget(id);
    levels_.told().take_told(id);
    if (budget_.is_limited()) budget_.set_hit(id, 0);
  }
  void set_now(int64_t ms) override {
    levels_.set_now(ms);
    model_->set_now(ms);
  }
  void clear() override {
    levels_.clear();
    budget_.clear();
    guard_.clear();
  }
  ReleasedAs released_as(BlockId id) const override { return levels_.released_as(id); }
  std::vector<double> learned() const override { return model_->hazards().counts(); }
  void learn(const std::vector<double>& counts) override { model_->set_counts(counts); }
  bool falls_back() const override { return guard_.falls_back(); }
  size_t num_bytes() const override {
    return sizeof(*this) + model_->num_bytes() + guard_.num_bytes() + levels_.num_bytes() +
           budget_.num_bytes() + chain_.capacity() * sizeof(Released) +
           left_.capacity() * sizeof(BlockId);
  }

 private:
  static constexpr int32_t kNone = Segments::kNone;
  static constexpr int64_t kPrefetchBlocks = 8;
  // Blocks without a reported release are numerous, so they are sampled at the rate for a segment
  // of this size.
  static constexpr int64_t kLooseBlocks = 4'096;
  // Assumed length in tokens of the hits that read a state which no request has released. Many of
  // these states belong to system prompts, which are shorter than most prompts.
  static constexpr int64_t kUnknownHit = 4'096;
  struct Released {  // a block with a hash
    int64_t prefix_tokens;
    BlockId id;
    uint32_t key;  // key of the block's hash
    bool operator<(const Released& other) const {
      return std::make_pair(prefix_tokens, id) < std::make_pair(other.prefix_tokens, other.id);
    }
  };

  void prefetch(BlockId id) const {
    view().blocks.prefetch(id);
    levels_.prefetch(id);
  }

  void release_chain(const ReleaseFeatures& features) {
    const int64_t n = num_in_chain_;
    int64_t num_hit = 0;
    while (num_hit < n && chain_[num_hit].prefix_tokens <= features.num_prefix_tokens) ++num_hit;
    // Finds the last block of the chain that has a record, but searches no further back than the
    // end of the hit. If an earlier request ended with this block, the new request continues that
    // request.
    int64_t num_known = n;
    const GhostRing::Record* last = nullptr;
    for (; num_known > 0; --num_known) {
      last = model_->find(chain_[num_known - 1].key);
      if (last != nullptr || num_known == num_hit) break;
    }
    const bool continues = num_known > 0 && last != nullptr && last->is_end;
    const bool forks = num_known > 0 && !continues;
    const int64_t turn = continues ? last->turn + 1 : 0;
    const int64_t gap = continues ? model_->clock() - last->time() : 0;
    const int64_t num_shared =
        forks ? release_fork(num_known, features) : release_shared(0, features);
    if (num_shared == n) return;
    const int64_t num_added = (n - num_known) * features.tokens_per_block;
    const int reuse_class = ReuseClass::of_own(turn, gap, num_added, features.num_output_tokens);
    release_segment(num_shared, n, model_->release_of(reuse_class, turn, n - num_shared), 0,
                    features);
  }

  // Releases the shared blocks of a chain that forks after `num_to_fork` blocks. If the fork is
  // inside a later turn of a conversation, that conversation continues from an earlier point, and
  // the blocks after the fork are left behind.
  int64_t release_fork(int64_t num_to_fork, const ReleaseFeatures& features) {
    Levels::Level& level = levels_.of(chain_[num_to_fork - 1].id);
    const int32_t s = level.segments.of(chain_[num_to_fork - 1].id);
    const Segments::Segment before = level.segments[s];
    const int64_t num_shared = release_shared(num_to_fork, features);
    // While the policy must follow LRU, blocks that no request released keep their place.
    const bool is_left =
        s != kNone && !model_->follows_lru() && ReuseClass::is_later_turn(before.reuse_class) &&
        level.segments[s].number == before.number && level.segments[s].num_blocks > 0;
    if (is_left) leave_behind(s, &level.segments);
    return num_shared;
  }
  void leave_behind(int32_t s, Segments* segments) {
    left_.clear();
    segments->add_members(s, &left_);
    const auto n = static_cast<int64_t>(left_.size());
    ReuseModel::Release release = model_->release_of(ReuseClass::kLeft, 0, n);
    const int32_t to = segments->open(model_->clock(), ReuseClass::kLeft, 0, (*segments)[s].cost);
    for (const BlockId id : left_) {
      const bool is_candidate = segments->is_candidate(id);
      if (is_candidate) segments->remove(id);
      segments->assign(id, to);
      if (is_candidate) segments->insert(id);
      if (is_candidate && budget_.is_limited()) add_to_budget(id);
      const Block* block = view().blocks.find(id);
      if (block == nullptr) continue;
      const uint32_t key = ReuseModel::key_of(block->hash, block->group);
      const GhostRing::Record* record = model_->find(key);
      release.turn = record == nullptr ? 0 : record->turn;
      const bool is_end = record != nullptr && record->is_end;
      model_->note_release(key, release, /*is_last=*/is_end, is_end);
    }
  }

  // Releases the blocks shared with other conversations. Blocks that were in the same segment are
  // released as one segment. The chain forks after `num_to_fork` blocks; 0: it does not fork.
  // Returns the number of shared blocks.
  int64_t release_shared(int64_t num_to_fork, const ReleaseFeatures& features) {
    const auto shares = [&](int64_t i) { return ReuseClass::is_shared(segment_of(i).reuse_class); };
    const int64_t n = num_in_chain_;
    int64_t num_shared = 0;
    while (num_shared < n && shares(num_shared)) ++num_shared;
    num_shared = std::max(num_shared, num_to_fork);
    for (int64_t first = 0, stop; first < num_shared; first = stop) {
      const Segments::Segment& before = segment_of(first);
      for (stop = first + 1; stop < num_shared && &segment_of(stop) == &before;) ++stop;
      int num_forks = shares(first) ? before.num_forks : 0;
      num_forks += first < num_to_fork && num_to_fork <= stop;
      num_forks = std::clamp(num_forks, 1, int{UINT16_MAX});
      const int shared = ReuseClass::of_shared(num_forks);
      release_segment(first, stop, model_->release_of(shared, 0, stop - first), num_forks,
                      features);
    }
    return num_shared;
  }

  // Releases blocks [first, stop) of the chain, deepest first.
  void release_segment(int64_t first, int64_t stop, const ReuseModel::Release& release,
                       int num_forks, const ReleaseFeatures& features) {
    Levels::Level* last = nullptr;
    int32_t s = kNone;
    // Opens the segment only when its first block is known, because segments must not be empty.
    const auto segment_in = [&](Levels::Level& level) {
      if (&level == last) return s;
      last = &level;
      s = level.segments.open(model_->clock(), release.reuse_class, num_forks,
                              cost_of(first, stop));
      return s;
    };
    guard_.open_segment(release.reuse_class, num_forks, cost_of(first, stop));
    if (!ends_.empty()) {
      const int64_t start = first == 0 ? 0 : chain_[first - 1].prefix_tokens;
      const bool is_last = stop == num_in_chain_;
      const int64_t end = is_last ? EndBlocks::kHeld : chain_[stop - 1].prefix_tokens;
      const bool is_own = !ReuseClass::is_shared(release.reuse_class);
      const int64_t num_hit = is_own ? features.num_prefix_tokens : EndBlocks::kHeld - 1;
      ends_.take(start, end, num_hit, [&](BlockId id) {
        release_end({chain_[stop - 1].prefix_tokens, id, 0}, features, segment_in);
      });
    }
    for (int64_t i = stop - 1; i >= first; --i) {
      const BlockId id = chain_[i].id;
      Levels::Level& level = levels_.move(id, given_to(chain_[i], features), features.tenant);
      level.segments.release(id, segment_in(level));
      levels_.told().set_told(id);
      guard_.note_release(chain_[i].key);
      model_->note_release(chain_[i].key, release, i + 1 == stop, i + 1 == num_in_chain_);
    }
  }
  // Moves a window or state block to a segment of the chain. The block may be idle.
  template <class SegmentIn>
  void release_end(const Released& block, const ReleaseFeatures& features, SegmentIn segment_in) {
    if (budget_.is_limited()) budget_.set_hit(block.id, block.prefix_tokens);
    const Block* cached = view().blocks.find(block.id);
    if (cached != nullptr && simulated() != nullptr) {
      guard_.note_release(ReuseModel::key_of(cached->hash, cached->group));
    }
    const bool is_candidate = levels_.of(block.id).segments.is_candidate(block.id);
    if (is_candidate) levels_.of(block.id).segments.remove(block.id);
    Levels::Level& level = levels_.move(block.id, given_to(block, features), features.tenant);
    level.segments.release(block.id, segment_in(level));
    if (is_candidate) return insert(block.id);
    levels_.told().set_told(block.id);
  }
  // Assigns a block whose release was not reported. `block`: null if it has no hash.
  void assign_unreported(BlockId id, const Block* block, uint32_t key) {
    Levels::Level& level = levels_.of(id);
    const int32_t before = level.segments.of(id);
    const int reuse_class =
        before == kNone ? ReuseClass::kLoose : ReuseClass::idle(level.segments[before].reuse_class);
    level.assign_loose(id, reuse_class, model_->clock());
    if (block == nullptr) return;
    guard_.note_loose(key, reuse_class);
    if (!is_side(block->group)) return;
    model_->note_release(key, model_->release_of(reuse_class, 0, kLooseBlocks), /*is_last=*/false,
                         /*is_end=*/false);
  }
  // Whether the group consists of windows or states. Such blocks are used only at the ends of hits,
  // so these uses do not count as uses of a chain.
  bool is_side(uint8_t group) const { return (side_groups_ >> group & 1) != 0; }
  void note_side(BlockId id) {
    const Block* block = view().blocks.find(id);
    if (block != nullptr) side_groups_ |= uint32_t{1} << block->group;
  }
  void add_end(BlockId id, int64_t hit_end) {
    note_side(id);
    ends_.add(id, hit_end);
  }
  void note_side_hit(BlockId id, uint32_t key) {
    Levels::Level& level = levels_.of(id);
    const int32_t s = level.segments.of(id);
    if (s == kNone || level.segments.is_candidate(id)) return;
    if (budget_.is_limited()) budget_.set_hit(id, kUnknownHit);
    const int reuse_class = ReuseClass::hit(level.segments[s].reuse_class);
    level.assign_loose(id, reuse_class, model_->clock());
    if (simulated() != nullptr) guard_.note_loose(key, reuse_class);
  }
  void add_to_budget(BlockId id) {
    budget_.remove(id);  // its class may have changed
    const Block* block = view().blocks.find(id);
    if (block == nullptr || !is_side(block->group)) return;
    const Segments& segments = levels_.of(id).segments;
    const int32_t s = segments.of(id);
    budget_.insert(id, s == kNone ? ReuseClass::kLoose : segments[s].reuse_class);
  }
  // The value by which states and window blocks are compared, also while the policy follows LRU. A
  // state is worth more if it makes longer hits possible.
  double worth_of_state(BlockId id, int64_t num_hit) const {
    const Levels::Level& level = levels_.of(id);
    const int32_t s = level.segments.of(id);
    if (s == kNone) return 0;
    return level.order.worth(s) * static_cast<double>(num_hit);
  }
  GivenPriority given_to(const Released& block, const ReleaseFeatures& features) const {
    if (features.num_retention == 0) return {};
    return GivenPriority::of(block.prefix_tokens, features, levels_.now());
  }
  const Segments::Segment& segment_of(int64_t i) const {
    const Segments& segments = levels_.of(chain_[i].id).segments;
    return segments[segments.of(chain_[i].id)];
  }
  // Returns the cost of the block in the middle of the range.
  float cost_of(int64_t first, int64_t stop) const {
    if (double_cost_tokens_ <= 0) return 1;
    const auto tokens = static_cast<double>(chain_[(first + stop) / 2].prefix_tokens);
    return static_cast<float>(1 + tokens / double_cost_tokens_);
  }

  int64_t num_blocks_;
  double double_cost_tokens_;
  std::shared_ptr<ReuseModel> model_;
  LruGuard guard_;
  Levels levels_;
  StateBudget budget_;
  // The first `num_in_chain_` entries are the blocks of the current release, in chain order.
  std::vector<Released> chain_;
  int64_t num_in_chain_ = 0;
  EndBlocks ends_;
  uint32_t side_groups_ = 0;   // one bit per group
  std::vector<BlockId> left_;  // members of a segment that is left behind
};

}  // namespace kvcache
