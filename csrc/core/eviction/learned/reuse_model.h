// SPDX-License-Identifier: Apache-2.0
// Learns how blocks are reused, from records of released blocks and counts derived from them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/eviction/learned/ages.h"
#include "core/eviction/learned/ghost_ring.h"
#include "core/eviction/learned/hazards.h"
#include "core/hash.h"
#include "core/eviction/learned/eviction_policy.h"

namespace kvcache {

// Blocks, whether cached or not, are identified by keys derived from their hashes. Ages are
// measured in milliseconds of the caller's clock, because the duration of a tool call or of a
// user's pause does not depend on the server's load.
class ReuseModel {
 public:
  static constexpr double kFirstBucket = 2'000;  // ms

  explicit ReuseModel(int64_t num_blocks)
      : num_blocks_(num_blocks), ages_(kFirstBucket), hazards_(ages_), ghosts_(kNumGhosts) {
    sample();
  }

  // Adds the capacity of another tier, in blocks.
  void add_blocks(int64_t num_blocks) {
    num_blocks_ += num_blocks;
    sample();
  }

  // Returns an even key that is never 0. A hash has the same key in every process, because sampling
  // must not depend on a secret.
  static uint32_t key_of(const Hash& hash, uint8_t group) {
    uint64_t word;
    std::memcpy(&word, hash.bytes, sizeof(word));
    return std::max(static_cast<uint32_t>((word + group) * 0x9E3779B97F4A7C15 >> 32) & ~1u, 2u);
  }

  int64_t clock() const { return clock_; }  // ms
  void set_now(int64_t ms) { clock_ = std::max(clock_, ms); }

  // Returns the record of a block, or null if there is none or it was overwritten.
  const GhostRing::Record* find(uint32_t key) {
    return is_sampled(key) || ghosts_.may_have_unsampled(key) ? ghosts_.find(key) : nullptr;
  }

  // Whether both tiers must evict the oldest segment first, like LRU.
  void follow_lru(bool follows) { follows_lru_ = follows; }
  bool follows_lru() const { return follows_lru_; }
  // Records the use of a block, if it is sampled.
  void note_use(uint32_t key) {
    if (!is_sampled(key)) return;
    GhostRing::Record* record = ghosts_.find(key);
    if (record == nullptr || record->bucket == GhostRing::kDone) return;
    const int bucket = ages_.of(clock_ - record->time());
    for (int b = static_cast<int>(record->bucket); b < bucket;) {
      hazards_.reach(record->reuse_class, ++b);
    }
    record->bucket = GhostRing::kDone;
    hazards_.use(record->reuse_class, bucket);
  }

  // Properties shared by all blocks of a released segment.
  struct Release {
    int reuse_class;
    int64_t turn;
    uint32_t last_sampled;  // keys up to this one are sampled
  };
  // A smaller fraction of a long segment's blocks is sampled, because they are usually reused
  // together.
  Release release_of(int reuse_class, int64_t turn, int64_t num_blocks) const {
    return {reuse_class, turn, last_sampled_ / share_of(num_blocks)};
  }
  // Records the release of a block if it is sampled or is the last block of its segment. Records of
  // last blocks are needed to detect turns and forks.
  void note_release(uint32_t key, const Release& release, bool is_last, bool is_end) {
    const bool is_sample = key <= release.last_sampled;
    if (is_sample || is_last) add_record(key, release, is_sample, is_end);
  }

  // Must be called at the end of each release. Values are recomputed every 32 releases. After the
  // first 1,024 releases, they change slowly and are recomputed only every 128 releases.
  void learn() {
    if (++num_releases_ % 32 != 0) return;
    age_samples();
    hazards_.fade();
    if (num_releases_ < 1'024 || num_releases_ % 128 == 0) hazards_.solve();
  }

  // Returns the value of keeping a block, given its release, in hits per millisecond.
  double index(int reuse_class, int64_t time) const {
    return hazards_.index(reuse_class, clock_ - time);
  }
  // Returns the expected number of hits of a block, minus `price` for each millisecond for which it
  // is kept.
  double gain(const ReleasedAs& as, double price) const {
    return hazards_.gain(as.reuse_class, clock_ - as.time, double{as.cost}, price);
  }
  // Whether the values of blocks released since this time are reliable: the records must reach back
  // at least twice as far.
  bool knows_since(int64_t time) const {
    return !ghosts_.is_full() || clock_ - ghosts_.at(ghosts_.first()).time() >= 2 * (clock_ - time);
  }

  const Hazards& hazards() const { return hazards_; }
  void set_counts(const std::vector<double>& counts) { hazards_.set_counts(counts); }
  size_t num_bytes() const { return sizeof(*this) + ghosts_.num_bytes(); }

 private:
  static constexpr int64_t kNumGhosts = 32'768;
  static constexpr int64_t kMostSampled = 64;  // limit on the expected samples of a segment

  // Returns the factor by which sampling is reduced in a segment of this many blocks: the lowest
  // power of two for which fewer than `kMostSampled` samples are expected.
  uint32_t share_of(int64_t num_blocks) const {
    uint32_t one_of = 1;
    while (num_blocks >= kMostSampled * one_of * one_of_ && one_of < 128) one_of *= 2;
    return one_of;
  }

  void sample() {
    one_of_ = std::max<int64_t>(num_blocks_ / 3'000, 1);
    last_sampled_ = static_cast<uint32_t>(UINT32_MAX / one_of_);
  }
  bool is_sampled(uint32_t key) const { return key <= last_sampled_; }

  void add_record(uint32_t key, const Release& release, bool is_sample, bool is_end) {
    GhostRing::Record record{};
    record.is_sample = is_sample;
    record.bucket = record.is_sample ? 0 : GhostRing::kDone;
    record.is_end = is_end;
    record.set_time(clock_);
    record.key = key;
    record.reuse_class = static_cast<uint32_t>(release.reuse_class);
    record.turn = static_cast<uint32_t>(std::min<int64_t>(release.turn, GhostRing::kMostTurn));
    ghosts_.add(record);
    if (record.is_sample) hazards_.reach(release.reuse_class, 0);
  }

  // Counts each sample that has reached an age bucket without being used.
  void age_samples() {
    for (int b = 1; b < AgeBuckets::kNum; ++b) {
      int64_t& number = aged_to_[b];
      number = std::max(number, ghosts_.first());
      for (; number < ghosts_.num_added(); ++number) {
        GhostRing::Record& record = ghosts_.at(number);
        if (clock_ - record.time() < ages_.first(b)) break;
        if (static_cast<int>(record.bucket) >= b) continue;  // usually a record that is done
        record.bucket = static_cast<uint32_t>(b);
        hazards_.reach(record.reuse_class, b);
      }
    }
  }

  int64_t num_blocks_;
  int64_t one_of_;         // one block in this many is sampled
  uint32_t last_sampled_;  // keys up to this one are sampled
  AgeBuckets ages_;
  Hazards hazards_;
  GhostRing ghosts_;
  bool follows_lru_ = false;
  std::array<int64_t, AgeBuckets::kNum> aged_to_{};  // record numbers
  int64_t clock_ = 0;                                // ms
  int64_t num_releases_ = 0;
};

}  // namespace kvcache
