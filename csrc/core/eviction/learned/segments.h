// Segments of blocks that were released together. Each is a run of a chain with one release time
// and one class.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A segment exists while it contains a block. Segments with eviction candidates are listed by
// class, oldest first. Within a segment, candidates are ordered by assignment.
class Segments {
 public:
  static constexpr int32_t kNone = 0;

  struct Segment {
    int64_t number;  // number of the segment in the order of `open`
    int64_t time;    // release time; never decreases from one segment to the next
    int32_t num_blocks;
    BlockId first, last;     // first and last candidate
    int32_t older, younger;  // neighbors in the class list; `younger` also links unused segments
    float cost;              // of recomputing a block, relative to a first block
    uint16_t num_forks;
    uint8_t reuse_class;
    bool is_listed;
  };

  explicit Segments(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)), all_(1) {}

  const Segment& operator[](int32_t s) const { return all_[s]; }
  int32_t of(BlockId id) const { return places_[id].segment; }
  bool is_listed(BlockId id) const {  // as a candidate
    const Place& place = places_[id];
    return place.prev != kNullBlock || place.next != kNullBlock ||
           (place.segment != kNone && all_[place.segment].first == id);
  }
  bool has_candidate(int32_t s) const { return all_[s].first != kNullBlock; }
  int32_t oldest(int reuse_class) { return end(&lists_[reuse_class].oldest); }
  int32_t youngest(int reuse_class) { return end(&lists_[reuse_class].youngest); }
  size_t num_bytes() const { return places_.num_bytes() + all_.capacity() * sizeof(Segment); }

  // Returns the key of a block, or 0 if it has no hash.
  uint32_t key(BlockId id) const { return places_[id].key & ~kTold; }
  void set_key(BlockId id, uint32_t key) { places_[id].key = key; }
  // Whether a request has released the block since the last `take_told`.
  void set_told(BlockId id) { places_[id].key |= kTold; }
  bool take_told(BlockId id) {
    const bool is_told = (places_[id].key & kTold) != 0;
    places_[id].key &= ~kTold;
    return is_told;
  }

  // The classification of the block at its release.
  ReleasedAs released_as(BlockId id) const {
    const int32_t s = of(id);
    if (s == kNone) return {};
    const Segment& segment = all_[s];
    return {segment.number, segment.time, segment.cost, segment.num_forks, segment.reuse_class};
  }

  // Opens an empty segment, to which blocks must be assigned immediately.
  int32_t open(int64_t time, int reuse_class, int num_forks = 0, float cost = 1) {
    if (unused_ == kNone) {
      unused_ = static_cast<int32_t>(all_.size());
      all_.emplace_back();
    }
    const int32_t s = unused_;
    unused_ = all_[s].younger;
    all_[s] = {};
    all_[s].number = ++num_opened_;
    all_[s].time = time;
    all_[s].cost = cost;
    all_[s].num_forks = static_cast<uint16_t>(num_forks);
    all_[s].reuse_class = static_cast<uint8_t>(reuse_class);
    return s;
  }
  // Assigns a block that is not a candidate; kNone: to no segment.
  void assign(BlockId id, int32_t s) {
    Place& place = places_[id];
    const int32_t before = std::exchange(place.segment, s);
    if (s != kNone) {
      place.order = ++num_assigned_;
      ++all_[s].num_blocks;
    }
    if (before == kNone || --all_[before].num_blocks > 0) return;
    if (all_[before].is_listed) unlist(before);
    all_[before].younger = unused_;
    unused_ = before;
  }
  void insert(BlockId id) {
    Place& place = places_[id];
    Segment& s = all_[place.segment];
    // Searches from the end, because a block is usually the last candidate unless its last child or
    // a pin was removed.
    BlockId before = s.last, after = kNullBlock;
    while (before != kNullBlock && is_before(place, places_[before])) {
      after = before;
      before = places_[before].prev;
    }
    place.prev = before;
    place.next = after;
    (before == kNullBlock ? s.first : places_[before].next) = id;
    (after == kNullBlock ? s.last : places_[after].prev) = id;
    if (!s.is_listed) list(place.segment);
  }
  void remove(BlockId id) {
    Place& place = places_[id];
    Segment& s = all_[place.segment];
    (place.prev == kNullBlock ? s.first : places_[place.prev].next) = place.next;
    (place.next == kNullBlock ? s.last : places_[place.next].prev) = place.prev;
    place.prev = place.next = kNullBlock;
  }
  void clear() {
    places_.zero();
    all_.resize(1);
    all_[kNone] = {};
    unused_ = kNone;
    lists_ = {};
  }

 private:
  static constexpr uint32_t kTold = 1;  // bit that no key uses

  struct Place {
    int32_t segment;
    uint32_t order;      // modulo 2**32, unique among the few blocks of a segment
    BlockId prev, next;  // neighboring candidates
    uint32_t key;        // key of the block, with the bit kTold
  };
  struct List {
    int32_t oldest, youngest;
  };

  // Removes segments without candidates from the end of a list and returns the end. Such segments
  // are not removed earlier, because the parent of the last candidate usually becomes the next
  // candidate.
  int32_t end(const int32_t* s) {
    while (*s != kNone && !has_candidate(*s)) unlist(*s);
    return *s;
  }
  static bool is_before(const Place& a, const Place& b) {
    return static_cast<int32_t>(a.order - b.order) < 0;
  }
  // The segment is usually the youngest of its class. It may be older if a block's last child was
  // removed.
  void list(int32_t s) {
    List& list = lists_[all_[s].reuse_class];
    int32_t older = list.youngest, younger = kNone;
    if (older != kNone && all_[older].number > all_[s].number) {
      older = kNone;
      younger = list.oldest;
      while (all_[younger].number < all_[s].number) {
        older = younger;
        younger = all_[younger].younger;
      }
    }
    all_[s].older = older;
    all_[s].younger = younger;
    all_[s].is_listed = true;
    (older == kNone ? list.oldest : all_[older].younger) = s;
    (younger == kNone ? list.youngest : all_[younger].older) = s;
  }
  void unlist(int32_t s) {
    List& list = lists_[all_[s].reuse_class];
    const int32_t older = all_[s].older, younger = all_[s].younger;
    (older == kNone ? list.oldest : all_[older].younger) = younger;
    (younger == kNone ? list.youngest : all_[younger].older) = older;
    all_[s].is_listed = false;
  }

  ZeroedArray<Place> places_;
  std::vector<Segment> all_;                        // segment 0 means no segment
  std::array<List, ReuseClass::kNum + 1> lists_{};  // including kLoaded
  int32_t unused_ = kNone;
  uint32_t num_assigned_ = 0;
  int64_t num_opened_ = 0;
};

}  // namespace kvcache
