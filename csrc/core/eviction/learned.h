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
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/eviction/learned/constants.h"
#include "core/eviction/learned/duel.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/segments.h"
#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"

namespace kvcache {

// What the policies of the two tiers share.
struct LearnedReuse {
  Hazards hazards;
  std::unique_ptr<Duel> duel;
  int64_t clock = 0;  // ms

  const Hazards* order() const { return duel->follows_lru() ? nullptr : &hazards; }
};

class Learned : public EvictionOrder, public BlockListener {
 public:
  explicit Learned(int64_t num_blocks) : num_blocks_(num_blocks), segments_(num_blocks) {
    compare(Duel::By::kBlock, /*num_host_blocks=*/0);
  }

  // Shared with the policy of another tier, which then learns from the same releases.
  const std::shared_ptr<LearnedReuse>& reuse() const { return reuse_; }
  // Sets what the duel compares. `num_host_blocks`: blocks that another tier caches in addition.
  // Called before all other calls.
  void compare(Duel::By by, int64_t num_host_blocks) {
    reuse_->duel = std::make_unique<Duel>(num_blocks_ - 1, &reuse_->hazards, by, num_host_blocks);
    if (by == Duel::By::kRequest) segments_.finish_chosen();
  }
  Duel& duel() const { return *reuse_->duel; }
  const Segments::Segment& segment_of(BlockId id) const { return segments_.segment_of(id); }

  bool is_candidate(BlockId id) const { return segments_.is_candidate(id); }
  void insert(BlockId id) override { segments_.insert(id); }
  void remove(BlockId id) override { segments_.remove(id); }
  BlockId victim() override { return segments_.victim(reuse_->order(), clock()); }
  size_t num_bytes() const override {
    return sizeof(*this) + sizeof(LearnedReuse) + segments_.num_bytes() +
           reuse_->hazards.num_bytes() + duel().num_bytes();
  }

  void on_publish(const Published& batch) override {
    for (int64_t i = 0; i < batch.n; ++i) num_keys_ += batch.hash(i) != nullptr;
    duel().raise_capacity(num_keys_);
    for (int64_t i = 0; i < batch.n; ++i) {
      if (batch.hash(i) == nullptr || batch.is_again) continue;
      const uint32_t key = Hazards::key_of(*batch.hash(i), batch.group);
      const bool is_side = this->is_side(batch.group);
      if (!is_side) reuse_->hazards.use(key, clock());
      // If another block still caches this content, its recomputation was not caused by an
      // eviction.
      if (is_side || batch.is_first[i] != 0) duel().use(key, /*is_hit=*/false, !is_side);
    }
  }
  void on_hit(const Hit& batch) override {
    for (const BlockId id : batch) {
      const Block* block = view().blocks.find(id);
      if (block == nullptr || batch.by == Hit::By::kOtherTier) continue;
      if (batch.by == Hit::By::kExpected) {
        side_groups_ |= uint32_t{1} << block->group;
        assign_loose(id, ReuseClass::kLikely);
        continue;
      }
      const uint32_t key = Hazards::key_of(block->hash, block->group);
      const bool is_side = this->is_side(block->group);
      reuse_->hazards.use(key, clock());
      duel().use(key, /*is_hit=*/true, !is_side);
      if (!is_side || segments_.of(id) == Segments::kNone || is_candidate(id)) continue;
      assign_loose(id, ReuseClass::kHit);
    }
  }
  void on_release(const Released& batch) override {
    if (batch.hit_ends != nullptr) {
      for (int64_t i = 0; i < batch.n; ++i) add_end(batch.ids[i], batch.hit_ends[i]);
    } else if (batch.features != nullptr && !batch.features->is_chain) {
      for (const BlockId id : batch) add_end(id, kHeld);
    } else if (batch.features != nullptr) {
      gather(batch);
      if (!chain_.empty()) release_chain(*batch.features);
      ends_.clear();
    }
  }
  void on_idle(const Blocks& batch) override {
    for (const BlockId id : batch) {
      const bool is_told = segments_.has(id, Segments::kTold);
      if (is_told) {
        segments_.unset(id, Segments::kTold);
      } else {
        const int before = segment_of(id).reuse_class;
        assign_loose(id, ReuseClass::is_loose(before) ? before : ReuseClass::kLoose);
      }
      const uint32_t key = key_of(id);
      if (key == 0) continue;
      if (!is_told && key % kOneOfSides == 0 && is_side(view().blocks.find(id)->group)) {
        reuse_->hazards.add(key, segment_of(id).reuse_class, false, 4 * kOneOfSides, clock());
      }
      duel().idle(key, segment_of(id));
    }
  }
  void on_forget(const Forgotten& batch) override {
    if (batch.why == Forgotten::Why::kFreed) return;
    if (batch.why == Forgotten::Why::kReset) return clear();
    for (int64_t i = 0; i < batch.n; ++i) num_keys_ -= batch.hash(i) != nullptr;
    if (batch.why == Forgotten::Why::kEvicted) duel().set_capacity(num_keys_);
    for (int64_t i = 0; i < batch.n; ++i) {
      if (batch.why == Forgotten::Why::kRemoved && batch.is_last(i)) {
        duel().remove(Hazards::key_of(*batch.hash(i), batch.group(i)));
      }
      segments_.assign(batch.ids[i], Segments::kNone);
    }
  }

 private:
  // One of this many windows and states that are not released with a chain is recorded.
  static constexpr int64_t kOneOfSides = 64;
  static constexpr int64_t kHeld = std::numeric_limits<int64_t>::max();
  struct InChain {
    int64_t prefix_tokens;
    BlockId id;
    uint32_t key;
  };
  // A window or state block. A hit needs the chain and, at its end, a state or a window, so these
  // blocks join the segment of the chain in which the hit ends.
  struct End {
    BlockId id;
    int64_t hit_end;  // length of the hit that reads it; kHeld: the request held the block
  };

  uint32_t key_of(BlockId id) const {  // 0: not published under a hash
    const Block* block = view().blocks.find(id);
    return block == nullptr ? 0 : Hazards::key_of(block->hash, block->group);
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
  void clear() {
    segments_.clear();
    duel().clear();
    num_keys_ = 0;
  }

  // Whether the group consists of windows or states, which are used at the ends of hits only.
  bool is_side(uint8_t group) const { return (side_groups_ >> group & 1) != 0; }
  void add_end(BlockId id, int64_t hit_end) {
    const Block* block = view().blocks.find(id);
    if (block == nullptr) return;
    side_groups_ |= uint32_t{1} << block->group;
    ends_.push_back({id, hit_end});
  }
  void assign_loose(BlockId id, int reuse_class) {
    const bool is_candidate = this->is_candidate(id);
    if (is_candidate) segments_.remove(id);
    segments_.assign_like(id, 0, clock(), reuse_class);
    if (is_candidate) insert_again(id);
  }
  void insert_again(BlockId id) {
    segments_.insert(id);
    if (!duel().compares_requests()) return;
    if (const uint32_t key = key_of(id)) duel().assign(key, segment_of(id));
  }

  // Collects the published blocks of the chain in its order.
  void gather(const Released& batch) {
    chain_.clear();
    for (int64_t i = batch.n - 1; i >= 0; --i) {
      const uint32_t key = key_of(batch.ids[i]);
      if (key != 0) chain_.push_back({batch.prefix_tokens[i], batch.ids[i], key});
    }
  }
  // What is known of the longest part of the chain that an earlier request released.
  struct Known {
    int64_t num = 0;  // blocks
    bool is_end = false;
    int num_forks = 0;
    int64_t gap = 0;  // ms since the release
  };
  Known known() const {
    for (int64_t num = num_in_chain(); num > 0; --num) {
      const InChain& last = chain_[num - 1];
      if (segments_.of(last.id) != Segments::kNone) {
        const Segments::Segment& segment = segment_of(last.id);
        return {num, segments_.has(last.id, Segments::kEnd), segment.num_forks,
                clock() - segment.time};
      }
      if (const Hazards::Record* record = reuse_->hazards.find(last.key)) {
        return {num, record->is_end != 0, ReuseClass::forks(static_cast<int>(record->reuse_class)),
                Hazards::age_of(*record, clock())};
      }
    }
    return {};
  }
  // Deeper blocks are released first.
  void release_chain(const ReleaseFeatures& features) {
    tick();
    const int64_t n = num_in_chain();
    const Known known = this->known();
    const int64_t to_fork = known.is_end ? 0 : known.num;  // the chain forks after these blocks
    int64_t num_shared = 0;
    while (num_shared < n && forks_of(num_shared, known) > 0) ++num_shared;
    num_shared = std::max(num_shared, to_fork);
    if (num_shared < n) {
      release_segment(num_shared, n, class_of_own(known, features), /*num_forks=*/0);
    }
    release_shared(num_shared, to_fork, known);
    segments_.set(chain_[n - 1].id, Segments::kEnd);
    reuse_->hazards.learn(clock());
  }
  // Releases the first num_shared blocks of the chain. Those that were in the same segment form a
  // segment again. The segment in which the first `to_fork` blocks end has one more fork.
  void release_shared(int64_t num_shared, int64_t to_fork, const Known& known) {
    for (int64_t stop = num_shared, first; stop > 0; stop = first) {
      const uint32_t s = segments_.of(chain_[stop - 1].id);
      const int before = forks_of(stop - 1, known);
      first = stop - 1;
      while (first > 0 && segments_.of(chain_[first - 1].id) == s) --first;
      const bool has_new_fork = first < to_fork && to_fork <= stop;
      const int forks = std::clamp(before + has_new_fork, 1, 100);
      release_segment(first, stop, ReuseClass::shared(forks), forks);
    }
  }
  // The number of forks after a block of the chain, before this release.
  int forks_of(int64_t i, const Known& known) const {
    const BlockId id = chain_[i].id;
    if (segments_.of(id) != Segments::kNone) return segment_of(id).num_forks;
    return i < known.num ? known.num_forks : 0;
  }
  // The class of the blocks that the request added to the known part of the chain.
  int class_of_own(const Known& known, const ReleaseFeatures& features) const {
    const int64_t gap = known.is_end ? known.gap : -1;
    const int64_t num_added = (num_in_chain() - known.num) * features.tokens_per_block;
    return ReuseClass::own(gap, num_added, features.num_output_tokens, features.ends_turn);
  }
  // Releases blocks [first, stop) of the chain, and the ends of hits within them.
  void release_segment(int64_t first, int64_t stop, int reuse_class, int num_forks) {
    const uint32_t s = segments_.open(clock(), reuse_class, num_forks);
    const int64_t n = num_in_chain();
    const int64_t start = first == 0 ? 0 : chain_[first - 1].prefix_tokens;
    const int64_t end = stop == n ? kHeld : chain_[stop - 1].prefix_tokens;
    for (const End& each : ends_) {
      if (start < each.hit_end && each.hit_end <= end) release_block(each.id, s);
    }
    for (int64_t i = stop - 1; i >= first; --i) release_block(chain_[i].id, s);
    const int64_t length = stop - first;
    const int64_t num =
        std::min<int64_t>(length, num_forks == 0 ? learned::kSamples : learned::kSamples / 2);
    for (int64_t j = 1; j <= num; ++j) {
      const int64_t i = first + length * j / num - 1;
      reuse_->hazards.add(chain_[i].key, reuse_class, i + 1 == n, 4 * length / num, clock());
    }
  }
  // Windows and states may be candidates.
  void release_block(BlockId id, uint32_t s) {
    const bool is_candidate = this->is_candidate(id);
    if (is_candidate) segments_.remove(id);
    segments_.assign(id, s);
    if (is_candidate) return insert_again(id);
    segments_.set(id, Segments::kTold);
  }
  int64_t num_in_chain() const { return static_cast<int64_t>(chain_.size()); }

  int64_t num_blocks_;
  std::shared_ptr<LearnedReuse> reuse_ = std::make_shared<LearnedReuse>();
  Segments segments_;
  std::vector<InChain> chain_;  // the blocks of the current release
  std::vector<End> ends_;       // of the current release
  uint32_t side_groups_ = 0;    // one bit per group
  int64_t first_now_ = 0, num_releases_ = 0;
  int64_t num_keys_ = 0;  // cached blocks that have a hash
};

}  // namespace kvcache
