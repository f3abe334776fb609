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
  static constexpr uint32_t kTold = 1U << 31, kKnown = 1U << 30, kEnd = 1U << 29;

  struct Segment {
    int64_t time = 0;     // of the release, in ms
    uint32_t number = 0;  // larger for later segments, modulo 2^32
    uint32_t num_blocks = 0;
    BlockId first = kNullBlock;       // candidate that was inserted first
    uint32_t older = 0, younger = 0;  // neighbors in the list; `younger` also links unused segments
    uint8_t reuse_class = 0;
    uint8_t num_forks = 0;
    uint8_t tenant = 0;  // 0: none
    uint8_t turn : 7;
    uint8_t is_listed : 1;
  };
  static_assert(sizeof(Segment) == 32);

  explicit Segments(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)), all_(1) {}

  Segment& operator[](uint32_t s) { return all_[s]; }
  const Segment& operator[](uint32_t s) const { return all_[s]; }
  uint32_t of(BlockId id) const { return places_[id] & ~kFlags; }
  const Segment& segment_of(BlockId id) const { return all_[of(id)]; }
  bool is_candidate(BlockId id) const { return has(id, kCandidate); }
  bool has(BlockId id, uint32_t flag) const { return (places_[id] & flag) != 0; }
  void set(BlockId id, uint32_t flag) { places_[id] |= flag; }
  void unset(BlockId id, uint32_t flag) { places_[id] &= ~flag; }
  // Number of assigned blocks by tenant.
  const std::array<int64_t, 64>& num_of_tenants() const { return num_of_tenants_; }
  void prefetch(BlockId id) const { __builtin_prefetch(&places_[id], 1); }

  // Opens an empty segment, to which a block must be assigned immediately.
  uint32_t open(int64_t time, int reuse_class, int num_forks = 0, int turn = 0) {
    if (unused_ == kNone) {
      unused_ = static_cast<uint32_t>(all_.size());
      all_.emplace_back();
    }
    const uint32_t s = unused_;
    unused_ = all_[s].younger;
    all_[s] = {};
    all_[s].time = time;
    all_[s].number = ++num_opened_;
    all_[s].reuse_class = static_cast<uint8_t>(reuse_class);
    all_[s].num_forks = static_cast<uint8_t>(num_forks);
    all_[s].turn = static_cast<uint8_t>(turn) & 0x7F;
    return s;
  }
  // Assigns a block that is not a candidate to a segment, or to none. Its flags end.
  void assign(BlockId id, uint32_t s) {
    const uint32_t before = of(id);
    places_[id] = s;
    if (s != kNone) {
      ++all_[s].num_blocks;
      ++num_of_tenants_[all_[s].tenant];
    }
    if (before == kNone) return;
    --num_of_tenants_[all_[before].tenant];
    if (--all_[before].num_blocks == 0) close(before);
  }
  void insert(BlockId id) {
    const uint32_t s = of(id);
    Segment& segment = all_[s];
    set(id, kCandidate);
    if (segment.first == kNullBlock) {
      segment.first = id;
      if (!segment.is_listed) list(s);
      if (chosen_ != s && chosen_by_ == nullptr) chosen_ = kNone;
      return;
    }
    if (!rings_) {
      rings_ = std::make_unique<ZeroedArray<Neighbors>>(places_.num_bytes() / sizeof(uint32_t));
    }
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
  // Turns a segment into one that is released now, with another class.
  void renew(uint32_t s, int64_t time, int reuse_class) {
    if (all_[s].is_listed) unlist(s);
    all_[s].time = time;
    all_[s].number = ++num_opened_;
    all_[s].reuse_class = static_cast<uint8_t>(reuse_class);
    if (all_[s].first != kNullBlock) list(s);
  }
  void clear() {
    places_.zero();
    rings_.reset();
    all_.assign(1, {});
    lists_ = {};
    listed_ = {};
    num_of_tenants_ = {};
    unused_ = chosen_ = kNone;
  }
  size_t num_bytes() const {
    return places_.num_bytes() + (rings_ ? rings_->num_bytes() : 0) +
           all_.capacity() * sizeof(Segment);
  }

  // Returns the segment with a candidate that is released first or, with hazards, that is worth
  // least: for each class, the oldest and the youngest segment are compared. The choice holds until
  // it has no more candidates. Without hazards, it also ends when another segment is listed; with
  // hazards, when the clock moves, except after `finish_chosen`.
  uint32_t choose(const Hazards* hazards, int64_t now) {
    if (chosen_ != kNone && all_[chosen_].first != kNullBlock && chosen_by_ == hazards &&
        (hazards == nullptr || chosen_at_ == now || finishes_)) {
      return chosen_;
    }
    chosen_ = kNone;
    chosen_by_ = hazards;
    chosen_at_ = now;
    double least = 0;
    const auto see = [&](uint32_t s) {
      const Segment& each = all_[s];
      const double value = Segments::value(each, hazards, now);
      const bool is_older = static_cast<int32_t>(each.number - all_[chosen_].number) < 0;
      if (chosen_ != kNone && (value > least || (value == least && !is_older))) return;
      chosen_ = s;
      least = value;
    };
    for (size_t word = 0; word < listed_.size(); ++word) {
      for (uint64_t left = listed_[word]; left != 0; left &= left - 1) {
        List& list = lists_[64 * word + static_cast<size_t>(__builtin_ctzll(left))];
        if (const uint32_t oldest = end(&list.oldest); oldest != kNone) see(oldest);
        if (hazards == nullptr) continue;
        if (const uint32_t youngest = end(&list.youngest); youngest != kNone) see(youngest);
      }
    }
    return chosen_;
  }
  // From now on, the clock does not end a choice. Without its state or window, which is evicted
  // first, the rest of a segment cannot be hit.
  void finish_chosen() { finishes_ = true; }
  // The value of a segment's blocks; without hazards, all are equal. Copies of blocks that are also
  // in the other tier are redundant.
  static double value(const Segment& segment, const Hazards* hazards, int64_t now) {
    if (segment.reuse_class == ReuseClass::kLoaded) return -1;
    return hazards == nullptr ? 0 : hazards->value(segment.reuse_class, now - segment.time);
  }
  // Calls a function for each listed segment with a candidate.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const List& list : lists_) {
      for (uint32_t s = list.oldest; s != kNone; s = all_[s].younger) {
        if (all_[s].first != kNullBlock) visit(s);
      }
    }
  }

 private:
  static constexpr uint32_t kCandidate = 1U << 28;
  static constexpr uint32_t kFlags = kTold | kKnown | kEnd | kCandidate;
  // Neighbors in the ring of candidates of a segment; null: the only one, or not a candidate.
  struct Neighbors {
    BlockId prev, next;
  };
  struct List {
    uint32_t oldest, youngest;
  };

  void close(uint32_t s) {
    if (all_[s].is_listed) unlist(s);
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
    const auto is_younger = [&](uint32_t other) {
      return static_cast<int32_t>(all_[other].number - all_[s].number) > 0;
    };
    uint32_t older = list.youngest, younger = kNone;
    if (older != kNone && is_younger(older)) {
      older = kNone;
      younger = list.oldest;
      while (!is_younger(younger)) {
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
    if (chosen_by_ == nullptr) chosen_ = kNone;
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
  std::array<int64_t, 64> num_of_tenants_{};
  uint32_t unused_ = kNone, num_opened_ = 0;
  uint32_t chosen_ = kNone;
  bool finishes_ = false;
  const Hazards* chosen_by_ = nullptr;
  int64_t chosen_at_ = 0;
};

}  // namespace kvcache
