// SPDX-License-Identifier: Apache-2.0
// Evicts the blocks that are least worth keeping, based on the observed reuse of similar blocks.
//
// The blocks that a request releases form segments: those shared with other conversations, and
// those of its own conversation only. Segments with similar features are assigned to the same
// class. From samples of released blocks, cached or not, the policy estimates the value of a block
// by class and age, and evicts from the segment of least value, deepest block first. A duel of
// simulated pools decides when it follows LRU instead. Ages are measured on the caller's clock, so
// the same calls at the same times cause the same evictions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/eviction/given_priority.h"
#include "core/eviction/learned/constants.h"
#include "core/eviction/learned/duel.h"
#include "core/eviction/learned/end_blocks.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/priorities.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/state_budget.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// What the policies of the two tiers share.
struct LearnedReuse {
  Hazards hazards;
  int64_t clock = 0;  // ms
  bool follows_lru = true;

  const Hazards* order() const { return follows_lru ? nullptr : &hazards; }
};

// How a block was released.
struct ReleasedAs {
  uint32_t segment = 0;  // number; 0: unknown
  int64_t time = 0;      // ms
  int reuse_class = 0;
};

class Learned : public EvictionOrder, public BlockListener {
 public:
  // `tenant_share`: fraction of the blocks that requests with the same cache salt may keep while
  // other requests need space; 1: no limit. `state_share`: the same for idle states and window
  // blocks.
  explicit Learned(int64_t num_blocks, double tenant_share = 1, double state_share = 1)
      : num_blocks_(num_blocks),
        most_of_tenant_(static_cast<int64_t>(tenant_share * static_cast<double>(num_blocks - 1))),
        has_shares_(tenant_share < 1),
        segments_(num_blocks),
        budget_(num_blocks, state_share),
        duel_(std::make_unique<Duel>(num_blocks - 1, &reuse_->hazards, Duel::By::kBlock)) {}

  // Shared with the policy of another tier, which then learns from the same releases.
  const std::shared_ptr<LearnedReuse>& reuse() const { return reuse_; }
  // At most one of these two is called, once and before all other calls. `simulate_all`: if all
  // evicted blocks are written to a host. Hits of single blocks are then not comparable with those
  // of a simulated pool, so the duel compares simulated pools only. `compare_requests`: if hits
  // need windows or states. The manager then reports the hits of each request, also in the
  // simulated pools.
  void simulate_all(int64_t num_host_blocks) {
    duel_ = std::make_unique<Duel>(num_blocks_ - 1, &reuse_->hazards, Duel::By::kSimulation,
                                   num_host_blocks);
  }
  void compare_requests(int64_t num_host_blocks) {
    duel_ = std::make_unique<Duel>(num_blocks_ - 1, &reuse_->hazards, Duel::By::kRequest,
                                   num_host_blocks);
    segments_.finish_chosen();
  }
  Duel* duel() { return duel_.get(); }
  void count_request(int64_t num_hit, int64_t by_lru, int64_t by_value) {
    duel_->count(num_hit, by_lru, by_value);
    reuse_->follows_lru = falls_back();
  }
  // Whether the policy follows LRU.
  bool falls_back() const { return duel_->follows_lru(); }
  ReleasedAs released_as(BlockId id) const {
    const Segments::Segment& segment = segments_.segment_of(id);
    return {segment.number, segment.time, segment.reuse_class};
  }

  void insert(BlockId id) override {
    if (priorities_.has(id)) {
      if (!priorities_.has_expired(id, now())) {
        return priorities_.insert(id, segments_.segment_of(id).number);
      }
      priorities_.forget(id);
    }
    segments_.insert(id);
    if (budget_.is_limited()) add_to_budget(id);
  }
  void remove(BlockId id) override {
    if (priorities_.is_candidate(id)) return priorities_.remove(id);
    segments_.remove(id);
    if (budget_.is_limited()) budget_.remove(id);
  }
  BlockId victim() override {
    for (BlockId id; (id = priorities_.expired(now())) != kNullBlock; insert(id)) remove(id);
    const BlockId state = budget_.victim([&](BlockId id, int64_t num_hit) {
      return value_of(segments_.segment_of(id)) * static_cast<double>(num_hit);
    });
    if (state != kNullBlock) return state;
    if (const BlockId low = priorities_.first(/*any=*/false); low != kNullBlock) return low;
    uint32_t s = has_shares_ ? choose_of_tenant() : Segments::kNone;
    if (s == Segments::kNone) s = segments_.choose(reuse_->order(), clock());
    if (has_shares_) ++num_taken_[segments_[s].tenant];
    return s == Segments::kNone ? priorities_.first(/*any=*/true) : segments_[s].first;
  }
  size_t num_bytes() const override {
    return sizeof(*this) + sizeof(LearnedReuse) + segments_.num_bytes() +
           reuse_->hazards.num_bytes() + priorities_.num_bytes() + budget_.num_bytes() +
           duel_->num_bytes();
  }

  void on_publish(const Published& batch) override {
    for (int64_t i = 0; i < batch.n; ++i) num_keys_ += batch.hash(i) != nullptr;
    duel_->raise_capacity(num_keys_);
    for (int64_t i = 0; i < batch.n; ++i) {
      if (batch.hash(i) == nullptr || batch.is_again) continue;
      const uint32_t key = Hazards::key_of(*batch.hash(i), batch.group);
      const bool is_side = this->is_side(batch.group);
      if (!is_side && reuse_->hazards.use(key, clock())) {
        segments_.set(batch.ids[i], Segments::kKnown);
      }
      // If another block still caches this content, its recomputation was not caused by an
      // eviction.
      if (duel_->is_sampled(key) && (is_side || batch.is_first[i] != 0)) use(key, false, !is_side);
    }
  }
  void on_hit(const Hit& batch) override {
    for (const BlockId id : batch) {
      const Block* block = view().blocks.find(id);
      if (block == nullptr || batch.by == Hit::By::kOtherTier) continue;
      if (batch.by == Hit::By::kExpected) {
        side_groups_ |= uint32_t{1} << block->group;
        if (budget_.is_limited()) budget_.set_hit(id, kUnknownHit);
        assign_loose(id, ReuseClass::kLikely);
        continue;
      }
      const uint32_t key = Hazards::key_of(block->hash, block->group);
      const bool is_side = this->is_side(block->group);
      reuse_->hazards.use(key, clock());
      if (duel_->is_sampled(key)) use(key, true, !is_side);
      if (!is_side || segments_.of(id) == Segments::kNone || is_candidate(id)) continue;
      if (budget_.is_limited()) budget_.set_hit(id, kUnknownHit);
      assign_loose(id, ReuseClass::hit(segments_.segment_of(id).reuse_class));
    }
  }
  void on_release(const Released& batch) override {
    if (batch.hit_ends != nullptr) {
      for (int64_t i = 0; i < batch.n; ++i) add_end(batch.ids[i], batch.hit_ends[i]);
    } else if (batch.features != nullptr && !batch.features->is_chain) {
      for (const BlockId id : batch) add_end(id, EndBlocks::kHeld);
    } else if (batch.features != nullptr) {
      gather(batch);
      if (!chain_.empty()) release_chain(*batch.features);
      ends_.clear();
    }
  }
  void on_idle(const Blocks& batch) override {
    loose_ = Segments::kNone;
    for (const BlockId id : batch) {
      const bool is_told = segments_.has(id, Segments::kTold);
      if (is_told) {
        segments_.unset(id, Segments::kTold);
      } else {
        const int before = segments_.segment_of(id).reuse_class;
        assign_loose(id, ReuseClass::is_loose(before) ? before : ReuseClass::kLoose);
      }
      const uint32_t key = key_of(id);
      if (key != 0 && !is_told && key % kOneOfSides == 0 &&
          is_side(view().blocks.find(id)->group)) {
        reuse_->hazards.add(key, segments_.segment_of(id).reuse_class, 0, false, 4 * kOneOfSides,
                            clock());
      }
      if (key != 0 && duel_->is_sampled(key)) duel_->idle(key, segments_.segment_of(id));
    }
  }
  void on_forget(const Forgotten& batch) override {
    if (batch.why == Forgotten::Why::kFreed) return;
    if (batch.why == Forgotten::Why::kReset) return clear();
    for (int64_t i = 0; i < batch.n; ++i) num_keys_ -= batch.hash(i) != nullptr;
    if (batch.why == Forgotten::Why::kEvicted) {
      num_taken_ = {};
      duel_->set_capacity(num_keys_);
    }
    for (int64_t i = 0; i < batch.n; ++i) {
      const BlockId id = batch.ids[i];
      if (batch.why == Forgotten::Why::kRemoved && batch.is_last(i)) {
        const uint32_t key = Hazards::key_of(*batch.hash(i), batch.group(i));
        if (duel_->is_sampled(key)) duel_->remove(key);
      }
      segments_.assign(id, Segments::kNone);
      priorities_.forget(id);
      if (budget_.is_limited()) budget_.set_hit(id, 0);
    }
  }

 private:
  static constexpr uint32_t kNumTenants = 63;  // more tenants share these
  // Assumed length in tokens of the hits that read a state which no request has released. Many of
  // these states belong to system prompts, which are shorter than most prompts.
  static constexpr int64_t kUnknownHit = 4'096;
  // One of this many windows and states that are not released with a chain is recorded.
  static constexpr int64_t kOneOfSides = 64;
  struct InChain {
    int64_t prefix_tokens;
    BlockId id;
    uint32_t key;
    bool operator<(const InChain& other) const {
      return std::make_pair(prefix_tokens, id) < std::make_pair(other.prefix_tokens, other.id);
    }
  };

  uint32_t key_of(BlockId id) const {  // 0: not published under a hash
    const Block* block = view().blocks.find(id);
    return block == nullptr ? 0 : Hazards::key_of(block->hash, block->group);
  }
  bool is_candidate(BlockId id) const {
    return segments_.is_candidate(id) || priorities_.is_candidate(id);
  }
  int64_t now() const { return view().clock.now_ms; }
  int64_t clock() const { return std::max(reuse_->clock, now()); }
  // If the caller's clock has never moved, releases are the clock.
  void tick() {
    if (num_releases_++ == 0) first_now_ = now();
    const bool moves = now() != first_now_;
    reuse_->clock =
        std::max(reuse_->clock + (moves ? 0 : static_cast<int64_t>(learned::kAge / 2)), now());
  }
  void use(uint32_t key, bool is_hit, bool counts) {
    duel_->use(key, is_hit, counts);
    reuse_->follows_lru = falls_back();
  }
  double value_of(const Segments::Segment& segment) const {
    return reuse_->hazards.value(segment.reuse_class, clock() - segment.time);
  }
  void clear() {
    segments_.clear();
    priorities_.clear();
    budget_.clear();
    duel_->clear();
    loose_ = Segments::kNone;
    num_keys_ = 0;
  }

  // Whether the group consists of windows or states, which are used at the ends of hits only.
  bool is_side(uint8_t group) const { return (side_groups_ >> group & 1) != 0; }
  void add_end(BlockId id, int64_t hit_end) {
    const Block* block = view().blocks.find(id);
    if (block == nullptr) return;
    side_groups_ |= uint32_t{1} << block->group;
    ends_.add(id, hit_end);
  }
  void add_to_budget(BlockId id) {
    budget_.remove(id);  // its class may have changed
    const Block* block = view().blocks.find(id);
    if (block == nullptr || !is_side(block->group)) return;
    budget_.insert(id, segments_.segment_of(id).reuse_class);
  }
  void assign_loose(BlockId id, int reuse_class) {
    const bool is_candidate = this->is_candidate(id);
    if (is_candidate) remove(id);
    // The segment may have been closed, and reused, since its last block was assigned.
    const Segments::Segment& last = segments_[loose_];
    if (last.number != loose_number_ || last.num_blocks == 0 || last.time != clock() ||
        last.reuse_class != reuse_class) {
      loose_ = segments_.open(clock(), reuse_class);
      loose_number_ = segments_[loose_].number;
    }
    const uint32_t s = loose_;
    segments_.assign(id, s);
    if (is_candidate) insert_again(id);
  }
  void insert_again(BlockId id) {
    insert(id);
    if (!duel_->compares_requests()) return;
    if (const uint32_t key = key_of(id)) duel_->assign(key, segments_.segment_of(id));
  }

  // Among tenants with too many blocks, returns the least valuable segment of the one that has most
  // and a candidate.
  uint32_t choose_of_tenant() {
    uint32_t found = Segments::kNone;
    int64_t most = most_of_tenant_;
    double least = 0;
    segments_.for_each([&](uint32_t s) {
      const Segments::Segment& each = segments_[s];
      const int64_t num = segments_.num_of_tenants()[each.tenant] - num_taken_[each.tenant];
      if (each.tenant == 0 || num < most || num <= most_of_tenant_) return;
      const double value = falls_back() ? 0 : value_of(each);
      const bool is_older = static_cast<int32_t>(each.number - segments_[found].number) < 0;
      if (num == most && (value > least || (value == least && !is_older))) return;
      found = s;
      most = num;
      least = value;
    });
    return found;
  }

  // Collects the blocks of the chain in its order. Candidates are not held by any request, so no
  // request can release them.
  void gather(const Released& batch) {
    chain_.clear();
    bool is_sorted = true;
    for (int64_t i = batch.n - 1; i >= 0; --i) {
      if (i >= 4) segments_.prefetch(batch.ids[i - 4]);
      const uint32_t key = key_of(batch.ids[i]);
      if (key == 0 || is_candidate(batch.ids[i])) continue;
      is_sorted &= chain_.empty() || chain_.back().prefix_tokens < batch.prefix_tokens[i];
      chain_.push_back({batch.prefix_tokens[i], batch.ids[i], key});
    }
    if (!is_sorted) std::sort(chain_.begin(), chain_.end());
  }
  // What is known of the longest part of the chain that an earlier request released.
  struct Known {
    int64_t num = 0;  // blocks
    bool is_end = false, is_later_turn = false;
    int turn = 0, num_forks = 0;
    int64_t gap = 0;  // ms since the release
    uint32_t s = Segments::kNone;
  };
  Known known() const {
    Known found;
    for (found.num = num_in_chain(); found.num > 0; --found.num) {
      const BlockId id = chain_[found.num - 1].id;
      if (segments_.of(id) != Segments::kNone || segments_.has(id, Segments::kKnown)) break;
    }
    if (found.num == 0) return found;
    const InChain& last = chain_[found.num - 1];
    found.s = segments_.of(last.id);
    if (found.s != Segments::kNone) {
      const Segments::Segment& segment = segments_[found.s];
      found.is_end = segments_.has(last.id, Segments::kEnd);
      found.turn = segment.turn;
      found.num_forks = segment.num_forks;
      found.gap = clock() - segment.time;
    } else if (const Hazards::Record* record = reuse_->hazards.find(last.key)) {
      found.is_end = record->is_end != 0;
      found.turn = record->turn;
      found.num_forks = ReuseClass::forks(static_cast<int>(record->reuse_class));
      found.gap = Hazards::age_of(*record, clock());
    }
    return found;
  }
  // Deeper blocks are released first.
  void release_chain(const ReleaseFeatures& features) {
    tick();
    ends_.sort();
    loose_ = Segments::kNone;
    const int64_t n = num_in_chain();
    const Known known = this->known();
    const uint32_t number = segments_[known.s].number;
    const int turn = known.is_end ? std::min(known.turn + 1, Hazards::kMostTurn) : 0;
    const int64_t to_fork = known.is_end ? 0 : known.num;  // the chain forks after these blocks
    const auto forks_of = [&](int64_t i) {
      const uint32_t s = segments_.of(chain_[i].id);
      return s != Segments::kNone ? int{segments_[s].num_forks}
             : i < known.num      ? known.num_forks
                                  : 0;
    };
    int64_t num_shared = 0;
    while (num_shared < n && forks_of(num_shared) > 0) ++num_shared;
    num_shared = std::max(num_shared, to_fork);
    if (num_shared < n) {
      const int own = ReuseClass::own(turn, known.gap, (n - known.num) * features.tokens_per_block,
                                      features.num_output_tokens);
      release_segment(num_shared, n, own, 0, turn, features);
    }
    // Shared blocks that were in the same segment form a segment again.
    for (int64_t stop = num_shared, first; stop > 0; stop = first) {
      const uint32_t s = segments_.of(chain_[stop - 1].id);
      const int before = forks_of(stop - 1);
      for (first = stop - 1; first > 0 && segments_.of(chain_[first - 1].id) == s;) --first;
      const int forks = std::clamp(before + (first < to_fork && to_fork <= stop), 1, 100);
      release_segment(first, stop, ReuseClass::shared(forks), forks, turn, features);
    }
    // A fork inside a later turn usually means that the conversation continues from an earlier
    // point. The rest of the segment is then left behind. While the policy follows LRU, blocks that
    // no request has released keep their place.
    if (to_fork > 0 && known.s != Segments::kNone && known.turn > 0 && known.num_forks == 0 &&
        !falls_back() && segments_[known.s].number == number) {
      segments_.renew(known.s, clock(), ReuseClass::kLeft);
    }
    segments_.set(chain_[n - 1].id, Segments::kEnd);
    reuse_->hazards.learn(clock());
  }
  // Releases blocks [first, stop) of the chain.
  void release_segment(int64_t first, int64_t stop, int reuse_class, int num_forks, int turn,
                       const ReleaseFeatures& features) {
    const uint32_t s = segments_.open(clock(), reuse_class, num_forks, turn);
    if (has_shares_ && features.tenant != 0) {
      segments_[s].tenant = static_cast<uint8_t>(1 + features.tenant % kNumTenants);
    }
    const int64_t n = num_in_chain();
    if (!ends_.empty()) {
      const int64_t start = first == 0 ? 0 : chain_[first - 1].prefix_tokens;
      const int64_t end = stop == n ? EndBlocks::kHeld : chain_[stop - 1].prefix_tokens;
      const int64_t num_hit = num_forks == 0 ? features.num_prefix_tokens : EndBlocks::kHeld - 1;
      ends_.take(start, end, num_hit, [&](BlockId id) {
        const int64_t prefix_tokens = chain_[stop - 1].prefix_tokens;
        if (budget_.is_limited()) budget_.set_hit(id, prefix_tokens);
        release_block(id, prefix_tokens, s, features);
      });
    }
    for (int64_t i = stop - 1; i >= first; --i) {
      release_block(chain_[i].id, chain_[i].prefix_tokens, s, features);
    }
    const int64_t length = stop - first;
    const int64_t num =
        std::min<int64_t>(length, num_forks == 0 ? learned::kSamples : learned::kSamples / 2);
    for (int64_t j = 1; j <= num; ++j) {
      const int64_t i = first + length * j / num - 1;
      reuse_->hazards.add(chain_[i].key, reuse_class, turn, i + 1 == n, 4 * length / num, clock());
    }
  }
  // Windows and states may be candidates.
  void release_block(BlockId id, int64_t prefix_tokens, uint32_t s,
                     const ReleaseFeatures& features) {
    const bool is_candidate = this->is_candidate(id);
    if (is_candidate) remove(id);
    segments_.assign(id, s);
    if (features.num_retention > 0) {
      const GivenPriority given = GivenPriority::of(prefix_tokens, features, now());
      if (given.priority >= 0) priorities_.give(id, given);
    }
    if (is_candidate) return insert_again(id);
    segments_.set(id, Segments::kTold);
  }
  int64_t num_in_chain() const { return static_cast<int64_t>(chain_.size()); }

  int64_t num_blocks_, most_of_tenant_;
  bool has_shares_;
  std::array<int64_t, 64> num_taken_{};  // victims of the current batch by tenant
  std::shared_ptr<LearnedReuse> reuse_ = std::make_shared<LearnedReuse>();
  Segments segments_;
  Priorities priorities_;
  StateBudget budget_;
  std::unique_ptr<Duel> duel_;
  std::vector<InChain> chain_;  // the blocks of the current release
  EndBlocks ends_;
  uint32_t side_groups_ = 0;                             // one bit per group
  uint32_t loose_ = Segments::kNone, loose_number_ = 0;  // segment of the last block not told
  int64_t first_now_ = 0, num_releases_ = 0;
  int64_t num_keys_ = 0;  // cached blocks that have a hash
};

}  // namespace kvcache
