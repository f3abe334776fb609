// Evicts the blocks that are least worth keeping, by what was learned of the reuse of blocks like
// them.
//
// Blocks that a request releases are segments: those that other conversations share, and its own.
// The class of a segment says what is like it. Of a sample of blocks the policy notes when they
// were released and when they are used again, cached or not. From that follows what a block of each
// class is worth at each age. The oldest or youngest segment of a class that is worth least is
// chosen, and used up before the next, deepest block first. Ages are counted in tokens released, so
// the choice depends on the calls alone, and on no clock. While too little is remembered to judge
// the oldest segments, the oldest goes first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/ghost_ring.h"
#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/segments.h"
#include "core/zeroed_array.h"

namespace kvcache {

class Learned : public EvictionPolicy {
 public:
  // `double_cost_tokens`: a block behind a prefix of so many tokens costs twice as much to compute
  // anew as the first one, and is worth twice as much; 0: all cost the same.
  Learned(int64_t num_blocks, double double_cost_tokens)
      : double_cost_tokens_(double_cost_tokens),
        last_sampled_(static_cast<uint32_t>(UINT32_MAX / std::max<int64_t>(num_blocks / 3'000, 1))),
        ages_(kFirstBucket),
        hazards_(ages_),
        ghosts_(kNumGhosts),
        segments_(num_blocks),
        keys_(static_cast<size_t>(num_blocks)),
        is_told_(static_cast<size_t>(num_blocks)) {}

  void insert(BlockId id) override { segments_.insert(id); }
  void remove(BlockId id) override { segments_.remove(id); }

  BlockId victim() override {
    if (!segments_.has_candidate(chosen_) || segments_[chosen_].number != chosen_number_) {
      const int32_t s = knows_enough() ? least_worth() : oldest();
      if (s == kNone) return kNullBlock;
      chosen_ = s;
      chosen_number_ = segments_[s].number;
    }
    return segments_[chosen_].first;
  }

  void on_publish(BlockId id, const Hash* hash, uint8_t group) override {
    if (hash == nullptr) return;
    keys_[id] = key_of(*hash, group);
    note_use(keys_[id]);
  }
  void on_hit(const BlockId* ids, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) note_use(keys_[ids[i]]);
  }
  void on_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                  const ReleaseFeatures& features) override {
    chain_.clear();
    for (int64_t i = n - 1; i >= 0; --i) {
      const bool is_free = segments_.is_listed(ids[i]);  // no request can release it
      if (keys_[ids[i]] != 0 && !is_free) chain_.push_back({prefix_tokens[i], ids[i]});
    }
    if (chain_.empty()) return;
    if (!std::is_sorted(chain_.begin(), chain_.end())) std::sort(chain_.begin(), chain_.end());
    clock_ += num_in_chain() * features.tokens_per_block;
    release_chain(features);
    learn();
  }
  void on_idle(BlockId id) override {
    if (is_told_[id] == 0) segments_.assign(id, loose_segment());
    is_told_[id] = 0;
  }
  void on_forget(BlockId id, const Hash*, uint8_t, bool) override {
    segments_.assign(id, kNone);
    keys_[id] = 0;
    is_told_[id] = 0;
  }
  void clear() override {
    segments_.clear();
    keys_.zero();
    is_told_.zero();
    chosen_ = loose_ = kNone;
  }
  std::vector<double> learned() const override { return hazards_.counts(); }
  void learn(const std::vector<double>& counts) override { hazards_.set_counts(counts); }
  size_t num_bytes() const override {
    return sizeof(*this) + ghosts_.num_bytes() + segments_.num_bytes() + keys_.num_bytes() +
           is_told_.num_bytes() + chain_.capacity() * sizeof(Released);
  }

 private:
  static constexpr int32_t kNone = Segments::kNone;
  static constexpr double kFirstBucket = 40'960;  // tokens
  static constexpr int64_t kNumGhosts = 32'768;
  static constexpr int32_t kMostLoose = 64;  // blocks of one segment

  struct Released {  // a block with a hash
    int64_t prefix_tokens;
    BlockId id;
    bool operator<(const Released& other) const {
      return std::make_pair(prefix_tokens, id) < std::make_pair(other.prefix_tokens, other.id);
    }
  };

  // Never 0. The same in each process: what is sampled must not depend on a secret.
  static uint32_t key_of(const Hash& hash, uint8_t group) {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return static_cast<uint32_t>((word + group) * 0x9E3779B97F4A7C15 >> 32) | 1u;
  }
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }

  void note_use(uint32_t key) {
    if (!is_sampled(key)) return;
    GhostRing::Record* record = ghosts_.find(key);
    if (record == nullptr || !record->is_sample || record->is_used) return;
    record->is_used = true;
    const int bucket = ages_.of(clock_ - record->time);
    while (record->bucket < bucket) hazards_.reach(record->reuse_class, ++record->bucket);
    hazards_.use(record->reuse_class, bucket);
  }

  // Every 32 releases; what blocks are worth changes more slowly, but for the first thousand.
  void learn() {
    if (++num_releases_ % 32 != 0) return;
    age_samples();
    hazards_.fade();
    if (num_releases_ < 1'024 || num_releases_ % 128 == 0) hazards_.solve();
  }

  // Counts each sample that has come to a bucket of ages unused.
  void age_samples() {
    for (int b = 1; b < AgeBuckets::kNum; ++b) {
      int64_t& number = aged_to_[b];
      number = std::max(number, ghosts_.first());
      for (; number < ghosts_.num_added(); ++number) {
        GhostRing::Record& record = ghosts_.at(number);
        if (static_cast<double>(clock_ - record.time) < ages_.begin(b)) break;
        if (!record.is_sample || record.is_used || record.bucket >= b) continue;
        record.bucket = static_cast<int8_t>(b);
        hazards_.reach(record.reuse_class, b);
      }
    }
  }

  int64_t num_in_chain() const { return static_cast<int64_t>(chain_.size()); }

  void release_chain(const ReleaseFeatures& features) {
    const int64_t n = num_in_chain();
    int64_t num_hit = 0;
    while (num_hit < n && chain_[num_hit].prefix_tokens <= features.num_prefix_tokens) ++num_hit;
    // As far as the chain is known, and whether a request ended there, which this one continues.
    int64_t num_known = n;
    const GhostRing::Record* last = nullptr;
    for (; num_known > 0; --num_known) {
      last = ghosts_.find(keys_[chain_[num_known - 1].id]);
      if (last != nullptr || num_known == num_hit) break;
    }
    const bool continues = num_known > 0 && last != nullptr && last->is_end;
    const bool forks = num_known > 0 && !continues;
    const int64_t turn = features.turn > 0 ? features.turn : continues ? last->turn + 1 : 0;
    const int64_t num_shared = release_shared(forks ? num_known : 0);
    if (num_shared == n) return;
    const int64_t num_added = (n - num_known) * features.tokens_per_block;
    const int reuse_class = ReuseClass::of_own(turn, num_added, features.num_output_tokens);
    release_segment(num_shared, n, reuse_class, 0, turn);
  }

  // Segments of what other conversations share, one per segment that its blocks had before. Here
  // the chain forks behind so many blocks; 0: it does not. How many blocks these are.
  int64_t release_shared(int64_t num_to_fork) {
    const auto shares = [&](int64_t i) {
      return ReuseClass::is_shared(segments_[segments_.of(chain_[i].id)].reuse_class);
    };
    const int64_t n = num_in_chain();
    int64_t num_shared = 0;
    while (num_shared < n && shares(num_shared)) ++num_shared;
    num_shared = std::max(num_shared, num_to_fork);
    for (int64_t first = 0, stop; first < num_shared; first = stop) {
      const int32_t before = segments_.of(chain_[first].id);
      for (stop = first + 1; stop < num_shared; ++stop) {
        if (segments_.of(chain_[stop].id) != before) break;
      }
      int num_forks = shares(first) ? segments_[before].num_forks : 0;
      num_forks += first < num_to_fork && num_to_fork <= stop;
      num_forks = std::clamp(num_forks, 1, int{UINT16_MAX});
      release_segment(first, stop, ReuseClass::of_shared(num_forks), num_forks, 0);
    }
    return num_shared;
  }

  // Blocks [first, stop) of the chain, deepest first.
  void release_segment(int64_t first, int64_t stop, int reuse_class, int num_forks, int64_t turn) {
    const int32_t s = segments_.open(clock_, reuse_class, num_forks, cost_of(first, stop));
    for (int64_t i = stop - 1; i >= first; --i) {
      const BlockId id = chain_[i].id;
      segments_.assign(id, s);
      is_told_[id] = 1;
      GhostRing::Record record{};
      record.is_sample = is_sampled(keys_[id]);
      if (!record.is_sample && i + 1 < stop) continue;
      record.is_end = i + 1 == num_in_chain();
      record.time = clock_;
      record.key = keys_[id];
      record.reuse_class = static_cast<uint8_t>(reuse_class);
      record.turn = static_cast<uint8_t>(std::min<int64_t>(turn, UINT8_MAX));
      ghosts_.add(record);
      if (record.is_sample) hazards_.reach(reuse_class, 0);
    }
  }
  // Of the block in the middle.
  float cost_of(int64_t first, int64_t stop) const {
    if (double_cost_tokens_ <= 0) return 1;
    const auto tokens = static_cast<double>(chain_[(first + stop) / 2].prefix_tokens);
    return static_cast<float>(1 + tokens / double_cost_tokens_);
  }
  // Of blocks whose release is none of a request's that goes.
  int32_t loose_segment() {
    const bool is_open = loose_ != kNone && segments_[loose_].num_blocks > 0 &&
                         segments_[loose_].num_blocks < kMostLoose &&
                         segments_[loose_].reuse_class == ReuseClass::kLoose &&
                         static_cast<double>(clock_ - segments_[loose_].time) < kFirstBucket;
    if (!is_open) loose_ = segments_.open(clock_, ReuseClass::kLoose);
    return loose_;
  }

  // Whether records reach back twice as far as the oldest segment with candidates was released.
  bool knows_enough() const {
    if (!ghosts_.is_full()) return true;
    const int32_t s = oldest();
    return s == kNone ||
           clock_ - ghosts_.at(ghosts_.first()).time >= 2 * (clock_ - segments_[s].time);
  }
  int32_t oldest() const {
    int32_t found = kNone;
    for (int c = 0; c < ReuseClass::kNum; ++c) {
      const int32_t s = segments_.oldest(c);
      if (s != kNone && (found == kNone || segments_[s].time < segments_[found].time)) found = s;
    }
    return found;
  }
  int32_t least_worth() const {
    int32_t found = kNone;
    double least = 0;
    for (int c = 0; c < ReuseClass::kNum; ++c) {
      for (const int32_t s : {segments_.oldest(c), segments_.youngest(c)}) {
        if (s == kNone) continue;
        const double worth =
            hazards_.index(c, clock_ - segments_[s].time) * double{segments_[s].cost};
        if (found == kNone || worth < least) found = s, least = worth;
      }
    }
    return found;
  }

  double double_cost_tokens_;
  uint32_t last_sampled_;  // keys up to this one are
  AgeBuckets ages_;
  Hazards hazards_;
  GhostRing ghosts_;
  Segments segments_;
  ZeroedArray<uint32_t> keys_;                       // of blocks with a hash; 0: none
  ZeroedArray<uint8_t> is_told_;                     // released by a request, and not idle yet
  std::array<int64_t, AgeBuckets::kNum> aged_to_{};  // numbers of records
  std::vector<Released> chain_;  // of the release that is told, first block first
  int64_t clock_ = 0;            // tokens released
  int64_t num_releases_ = 0;
  int32_t chosen_ = kNone, loose_ = kNone;  // segments
  int64_t chosen_number_ = 0;
};

}  // namespace kvcache
