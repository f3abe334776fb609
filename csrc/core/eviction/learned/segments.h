// SPDX-License-Identifier: Apache-2.0
// Segments of blocks that were released together. Each segment is part of a chain, with one release
// time and one class.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/eviction/learned/reuse_class.h"
#include "core/hash.h"
#include "core/eviction/learned/eviction_policy.h"
#include "core/zeroed_array.h"

namespace kvcache {

// A segment exists while it contains a block. Its members, whether or not they are candidates for
// eviction, are linked in the order of assignment. Segments with candidates are listed by class,
// oldest first.
//
// Each block needs only 8 bytes, because members form a singly linked list. Blocks usually leave
// from the front: the deepest block is assigned first, and evicted or released again first. To
// remove any other block, its predecessor is found by a search from the front. The search remembers
// the members that it passed, because the next block to leave is usually a neighbor. A block that
// joins no other segment stays linked until the next search, so the blocks of a long segment can be
// removed efficiently in any order.
class Segments {
 public:
  static constexpr int32_t kNone = 0;

  struct Segment {
    int64_t number;  // number of the segment in the order of `open`
    int64_t time;    // release time; never decreases from one segment to the next
    int32_t num_blocks, num_candidates;
    BlockId first, last;     // members
    BlockId scanned;         // no member before this one is a candidate, if there are candidates
    int32_t older, younger;  // neighbors in the class list; `younger` also links unused segments
    float cost;              // cost of recomputing a block, relative to the first block of a prompt
    uint16_t num_forks;
    uint16_t reuse_class;
    bool is_listed;
  };

  explicit Segments(int64_t num_blocks) : places_(static_cast<size_t>(num_blocks)), all_(1) {}

  const Segment& operator[](int32_t s) const { return all_[s]; }
  int32_t of(BlockId id) const { return has_left(id) ? kNone : linked_in(id); }
  bool is_candidate(BlockId id) const { return (places_[id].next & kFlag) != 0; }
  bool has_candidate(int32_t s) const { return all_[s].num_candidates > 0; }
  // Returns the first candidate of a segment that has one.
  BlockId first_candidate(int32_t s) {
    BlockId& id = all_[s].scanned;
    while (!is_candidate(id)) id = next(id);
    return id;
  }
  // Calls a function for each class that may have a candidate, in ascending order of the classes.
  template <class Visit>
  void for_each_class(Visit visit) const {
    for (size_t word = 0; word < listed_.size(); ++word) {
      for (uint64_t left = listed_[word]; left != 0; left &= left - 1) {
        visit(static_cast<int>(64 * word) + __builtin_ctzll(left));
      }
    }
  }
  int32_t oldest(int reuse_class) { return end(&lists_[reuse_class].oldest); }
  int32_t youngest(int reuse_class) { return end(&lists_[reuse_class].youngest); }
  size_t num_bytes() const { return places_.num_bytes() + all_.capacity() * sizeof(Segment); }
  // Appends the members of a segment to `out`, in the order of assignment.
  void add_members(int32_t s, std::vector<BlockId>* out) const {
    for (BlockId id = all_[s].first; id != kNullBlock; id = next(id)) {
      if (!has_left(id)) out->push_back(id);
    }
  }
  void prefetch(BlockId id) const { __builtin_prefetch(&places_[id], 1); }

  // Whether a request has released the block since the last `take_told`.
  void set_told(BlockId id) { places_[id].segment |= kFlag; }
  bool take_told(BlockId id) {
    const bool is_told = (places_[id].segment & kFlag) != 0;
    places_[id].segment &= ~kFlag;
    return is_told;
  }

  // Returns the classification of the block at its release.
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
    all_[s].reuse_class = static_cast<uint16_t>(reuse_class);
    return s;
  }
  // Assigns a block that is not a candidate to segment s, or to no segment if s is kNone.
  void assign(BlockId id, int32_t s) {
    const int32_t before = of(id);
    if (before != kNone) leave(id, &all_[before], /*joins=*/s != kNone);
    if (s != kNone) append(id, s);
    if (before != kNone && --all_[before].num_blocks == 0) close(before);
  }
  // Assigns a block that a request is releasing to segment s.
  void release(BlockId id, int32_t s) {
    if (of(id) == kNone) {
      append(id, s);
    } else {
      assign(id, s);
    }
  }
  void insert(BlockId id) {
    const int32_t s = of(id);
    Segment& segment = all_[s];
    places_[id].next |= kFlag;
    // There are other candidates only if the blocks do not form a chain or a pin was removed.
    segment.scanned = segment.num_candidates++ == 0 ? id : segment.first;
    if (!segment.is_listed) list(s);
  }
  void remove(BlockId id) {
    places_[id].next &= ~kFlag;
    --all_[of(id)].num_candidates;
  }
  void clear() {
    places_.zero();
    all_.resize(1);
    all_[kNone] = {};
    unused_ = kNone;
    lists_ = {};
    listed_ = {};
  }

 private:
  static constexpr uint32_t kFlag = uint32_t{1} << 31, kLeft = uint32_t{1} << 30;
  struct Place {
    // With kFlag: a request has released the block. With kLeft: the block has left the segment, but
    // is still linked.
    uint32_t segment;
    uint32_t next;  // member that was assigned next; with kFlag: the block is a candidate
  };
  static_assert(sizeof(Place) == 8, "every byte here is paid once per block");
  struct List {
    int32_t oldest, youngest;
  };

  BlockId next(BlockId id) const { return static_cast<BlockId>(places_[id].next & ~kFlag); }
  void set_next(BlockId id, BlockId next) {
    places_[id].next = (places_[id].next & kFlag) | static_cast<uint32_t>(next);
  }
  bool has_left(BlockId id) const { return (places_[id].segment & kLeft) != 0; }
  int32_t linked_in(BlockId id) const {
    return static_cast<int32_t>(places_[id].segment & ~(kFlag | kLeft));
  }
  // Appends a block that is in no segment.
  void append(BlockId id, int32_t s) {
    if (has_left(id)) unlink_left(&all_[linked_in(id)], kNullBlock);
    places_[id].segment |= static_cast<uint32_t>(s);
    Segment& segment = all_[s];
    if (segment.first == kNullBlock) {
      segment.first = id;
    } else {
      set_next(segment.last, id);
    }
    segment.last = id;
    ++segment.num_blocks;
  }
  [[gnu::noinline]] void close(int32_t s) {
    unlink_left(&all_[s], kNullBlock);
    if (all_[s].is_listed) unlist(s);
    all_[s].younger = unused_;
    unused_ = s;
  }
  // Removes a block that is not a candidate from its segment.
  void leave(BlockId id, Segment* segment, bool joins) {
    if (segment->first == id) {
      unlink(id, kNullBlock, segment);
    } else {
      leave_from_middle(id, segment, joins);
    }
  }
  [[gnu::noinline]] void leave_from_middle(BlockId id, Segment* segment, bool joins) {
    if (passed() == id) --num_passed_;
    BlockId before = passed();
    if (next(before) != id || of(before) != of(id)) {
      if (!joins && segment->last != id) {
        places_[id].segment |= kLeft;
        return;
      }
      before = unlink_left(segment, id);
    }
    unlink(id, before, segment);
  }
  // `before`: the block that is linked before this one; the null block if it is the first.
  void unlink(BlockId id, BlockId before, Segment* segment) {
    Place& place = places_[id];
    const auto after = static_cast<BlockId>(place.next);
    if (segment->scanned == id) segment->scanned = after;
    if (before == kNullBlock) {
      segment->first = after;
    } else {
      set_next(before, after);
      if (segment->last == id) segment->last = before;
    }
    place.segment &= kFlag;
    place.next = kNullBlock;
  }
  // Unlinks the blocks that have left a segment, up to `stop` (the null block: all of them).
  // Returns the member before `stop`; the null block if there is none.
  BlockId unlink_left(Segment* segment, BlockId stop) {
    BlockId before = kNullBlock;
    for (BlockId at = segment->first; at != stop;) {
      const BlockId after = next(at);
      if (has_left(at)) {
        unlink(at, before, segment);
      } else {
        before = passed_[++num_passed_ % kNumPassed] = at;
      }
      at = after;
    }
    return before;
  }
  BlockId passed() const { return passed_[num_passed_ % kNumPassed]; }
  // Removes segments without candidates from the end of a list and returns the end. Such segments
  // are not removed earlier, because the parent of the last candidate usually becomes the next
  // candidate.
  int32_t end(const int32_t* s) {
    while (*s != kNone && !has_candidate(*s)) unlist(*s);
    return *s;
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
    listed_[all_[s].reuse_class / 64] |= uint64_t{1} << all_[s].reuse_class % 64;
    (older == kNone ? list.oldest : all_[older].younger) = s;
    (younger == kNone ? list.youngest : all_[younger].older) = s;
  }
  void unlist(int32_t s) {
    List& list = lists_[all_[s].reuse_class];
    const int32_t older = all_[s].older, younger = all_[s].younger;
    (older == kNone ? list.oldest : all_[older].younger) = younger;
    (younger == kNone ? list.youngest : all_[younger].older) = older;
    all_[s].is_listed = false;
    if (list.oldest == kNone) {
      listed_[all_[s].reuse_class / 64] &= ~(uint64_t{1} << all_[s].reuse_class % 64);
    }
  }

  ZeroedArray<Place> places_;
  std::vector<Segment> all_;                                  // segment 0 means no segment
  std::array<List, ReuseClass::kNum + 1> lists_{};            // including kLoaded
  std::array<uint64_t, ReuseClass::kNum / 64 + 1> listed_{};  // classes with a list, one bit each
  int32_t unused_ = kNone;
  int64_t num_opened_ = 0;
  // Members that the last search passed, youngest last. Entries may be outdated.
  static constexpr uint32_t kNumPassed = 1'024;
  std::array<BlockId, kNumPassed> passed_{};
  uint32_t num_passed_ = 0;
};

}  // namespace kvcache
