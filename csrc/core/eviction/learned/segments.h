// SPDX-License-Identifier: Apache-2.0
// Segments of blocks that were released together, and the choice of the next one to evict from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/eviction/learned/hazards.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A segment is a part of a chain, with one release time and one class. It exists while it contains
// a block. Its candidates for eviction form a ring in the order of `insert`; usually it has one,
// the last block of its part of the chain. Segments with candidates are listed by class, oldest
// first.
class Segments {
 public:
  static constexpr uint32_t kNone = 0;
  // Flags that a block keeps in addition to its segment.
  static constexpr uint32_t kTold = 1U << 31, kEnd = 1U << 30;

  struct Segment {
    int64_t time = 0;     // of the release, in ms
    uint32_t number = 0;  // larger for later segments, modulo 2^32; 0: no segment
    uint32_t num_blocks = 0;
    BlockId first = kNullBlock;       // candidate that was inserted first
    uint32_t older = 0, younger = 0;  // neighbors in the list; `younger` also links unused segments
    uint8_t reuse_class = 0;
    uint8_t num_forks = 0;
    bool is_listed = false;
  };
  static_assert(sizeof(Segment) == 32);

  explicit Segments(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)), all_(1) {}

  uint32_t of(BlockId id) const { return places_[id] & ~kFlags; }
  const Segment& segment_of(BlockId id) const { return all_[of(id)]; }
  bool is_candidate(BlockId id) const { return has(id, kCandidate); }
  bool has(BlockId id, uint32_t flag) const { return (places_[id] & flag) != 0; }
  void set(BlockId id, uint32_t flag) { places_[id] |= flag; }
  void unset(BlockId id, uint32_t flag) { places_[id] &= ~flag; }

  // Opens an empty segment, to which a block must be assigned immediately.
  uint32_t open(int64_t time, int reuse_class, int num_forks = 0) {
    if (unused_ == kNone) {
      unused_ = static_cast<uint32_t>(all_.size());
      all_.emplace_back();
    }
    last_ = unused_;
    last_like_ = 0;
    unused_ = all_[last_].younger;
    all_[last_] = {};
    all_[last_].time = time;
    all_[last_].number = ++num_opened_;
    all_[last_].reuse_class = static_cast<uint8_t>(reuse_class);
    all_[last_].num_forks = static_cast<uint8_t>(num_forks);
    return last_;
  }
  // Assigns a block that is not a candidate to a segment, or to none. Its flags end.
  void assign(BlockId id, uint32_t s) {
    const uint32_t before = of(id);
    places_[id] = s;
    if (s != kNone) ++all_[s].num_blocks;
    if (before != kNone && --all_[before].num_blocks == 0) close(before);
  }
  // Assigns a block like one of another segment, with this number (0: none). Blocks that are
  // assigned like one another, one after the other, form a segment.
  void assign_like(BlockId id, uint32_t number, int64_t time, int reuse_class) {
    const Segment& last = all_[last_];
    const bool is_like_last = last_ != kNone && last_like_ == number && last.time == time &&
                              last.reuse_class == reuse_class;
    assign(id, is_like_last ? last_ : open(time, reuse_class));
    last_like_ = number;
  }
  void insert(BlockId id) {
    const uint32_t s = of(id);
    Segment& segment = all_[s];
    set(id, kCandidate);
    if (segment.first == kNullBlock) {
      segment.first = id;
      if (!segment.is_listed) list(s);
      if (chosen_ != s && !finishes()) chosen_ = kNone;
      return;
    }
    if (!rings_) {
      rings_ = std::make_unique<ZeroedArray<Neighbors>>(places_.num_bytes() / sizeof(uint32_t));
    }
    // Inserted at the end of the ring, that is, before its first candidate.
    ZeroedArray<Neighbors>& ring = *rings_;
    Neighbors& first = ring[segment.first];
    if (first.next == kNullBlock) first = {segment.first, segment.first};
    ring[id] = {first.prev, segment.first};
    ring[first.prev].next = id;
    first.prev = id;
  }
  void remove(BlockId id) {
    Segment& segment = all_[of(id)];
    unset(id, kCandidate);
    const Neighbors at = rings_ ? (*rings_)[id] : Neighbors{};
    if (rings_) (*rings_)[id] = {};
    if (at.next == kNullBlock || at.next == id) {
      segment.first = kNullBlock;
      return;
    }
    (*rings_)[at.prev].next = at.next;
    (*rings_)[at.next].prev = at.prev;
    if (segment.first == id) segment.first = at.next;
  }
  void clear() {
    places_.zero();
    rings_.reset();
    all_.assign(1, {});
    lists_ = {};
    listed_ = {};
    unused_ = chosen_ = last_ = kNone;
  }
  size_t num_bytes() const {
    return places_.num_bytes() + (rings_ ? rings_->num_bytes() : 0) +
           all_.capacity() * sizeof(Segment);
  }

  // Returns the candidate of the segment that was released first or, with hazards, that is worth
  // least: for each class, the oldest and the youngest segment are compared. The choice holds until
  // the segment has no more candidates, another one has its first candidate, or the clock moves.
  BlockId victim(const Hazards* hazards, int64_t now) {
    if (all_[chosen_].first == kNullBlock || chosen_by_ != hazards ||
        (chosen_at_ != now && !finishes())) {
      choose(hazards, now);
    }
    return all_[chosen_].first;
  }
  // From now on, with hazards, a choice holds until the segment has no more candidates: without its
  // state or window, which is evicted first, the rest of a segment cannot be hit.
  void finish_chosen() { finishes_ = true; }
  // The value of a segment's blocks; without hazards, all are equal. Copies of blocks that are also
  // in the other tier are redundant.
  static double value(const Segment& segment, const Hazards* hazards, int64_t now) {
    if (segment.reuse_class == ReuseClass::kLoaded) return -1;
    return hazards == nullptr ? 0 : hazards->value(segment.reuse_class, now - segment.time);
  }

 private:
  static constexpr uint32_t kCandidate = 1U << 29;
  static constexpr uint32_t kFlags = kTold | kEnd | kCandidate;
  // Neighbors in the ring of candidates of a segment; null: the only one, or not a candidate.
  struct Neighbors {
    BlockId prev, next;
  };
  struct List {
    uint32_t oldest, youngest;
  };

  bool is_older(uint32_t s, uint32_t other) const {
    return static_cast<int32_t>(all_[s].number - all_[other].number) < 0;
  }
  bool finishes() const { return finishes_ && chosen_by_ != nullptr; }
  void choose(const Hazards* hazards, int64_t now) {
    chosen_ = kNone;
    chosen_by_ = hazards;
    chosen_at_ = now;
    double least = 0;
    const auto see = [&](uint32_t s) {
      if (s == kNone) return;
      const double value = Segments::value(all_[s], hazards, now);
      const bool is_better = value < least || (value == least && is_older(s, chosen_));
      if (chosen_ != kNone && !is_better) return;
      chosen_ = s;
      least = value;
    };
    for (size_t word = 0; word < listed_.size(); ++word) {
      for (uint64_t left = listed_[word]; left != 0; left &= left - 1) {
        List& list = lists_[64 * word + static_cast<size_t>(__builtin_ctzll(left))];
        see(end(&list.oldest));
        if (hazards != nullptr && list.youngest != list.oldest) see(end(&list.youngest));
      }
    }
  }
  void close(uint32_t s) {
    if (all_[s].is_listed) unlist(s);
    if (s == last_) last_ = kNone;
    all_[s].younger = unused_;
    unused_ = s;
  }
  // Unlists segments without candidates at the end of a list. They stay until then, because the
  // parent of the last candidate usually becomes the next candidate.
  uint32_t end(const uint32_t* s) {
    while (*s != kNone && all_[*s].first == kNullBlock) unlist(*s);
    return *s;
  }
  // The segment is usually the youngest of its class.
  void list(uint32_t s) {
    List& list = lists_[all_[s].reuse_class];
    uint32_t older = list.youngest, younger = kNone;
    if (older != kNone && is_older(s, older)) {
      older = kNone;
      younger = list.oldest;
      while (!is_older(s, younger)) {
        older = younger;
        younger = all_[younger].younger;
      }
    }
    all_[s].older = older;
    all_[s].younger = younger;
    all_[s].is_listed = true;
    listed_[all_[s].reuse_class / 64] |= uint64_t{1} << all_[s].reuse_class % 64;
    (older == kNone ? list.oldest : all_[older].younger) = s;
    (younger == kNone ? list.youngest : all_[younger].older) = s;
  }
  void unlist(uint32_t s) {
    List& list = lists_[all_[s].reuse_class];
    const uint32_t older = all_[s].older, younger = all_[s].younger;
    (older == kNone ? list.oldest : all_[older].younger) = younger;
    (younger == kNone ? list.youngest : all_[younger].older) = older;
    all_[s].is_listed = false;
    if (list.oldest == kNone) {
      listed_[all_[s].reuse_class / 64] &= ~(uint64_t{1} << all_[s].reuse_class % 64);
    }
    if (chosen_ == s) chosen_ = kNone;
  }

  ZeroedArray<uint32_t> places_;                    // segment and flags of each block
  std::unique_ptr<ZeroedArray<Neighbors>> rings_;   // set when a segment has two candidates
  std::vector<Segment> all_;                        // segment 0: none
  std::array<List, ReuseClass::kNum + 1> lists_{};  // including kLoaded
  std::array<uint64_t, ReuseClass::kNum / 64 + 1> listed_{};  // classes with a list
  uint32_t unused_ = kNone, num_opened_ = 0;
  uint32_t last_ = kNone, last_like_ = 0;  // the segment that was opened last, if it still exists
  uint32_t chosen_ = kNone;
  bool finishes_ = false;
  const Hazards* chosen_by_ = nullptr;
  int64_t chosen_at_ = 0;
};

}  // namespace kvcache
