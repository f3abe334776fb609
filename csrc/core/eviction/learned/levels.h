// SPDX-License-Identifier: Apache-2.0
// Segments of blocks, by priority and tenant.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/eviction/given_priority.h"
#include "core/eviction/learned/copied_segment.h"
#include "core/eviction/learned/loose_segment.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/worth_order.h"

namespace kvcache {

// Lower priorities are evicted first, regardless of value (except for states beyond their budget).
// Within a priority, the victim is taken from the tenant with the most blocks among the tenants
// that exceed their share. If no tenant exceeds its share, the block with the lowest value is the
// victim. In most pools no block has a priority and no share is set. Such pools have only one level
// and need no search.
class Levels {
 public:
  struct Level {
    Level(int64_t num_blocks, const ReuseModel* model)
        : segments(num_blocks), order(model, &segments) {}
    void clear() {
      segments.clear();
      order.clear();
      for (LooseSegment& each : loose) each.clear();
      ended.clear();
    }

    // Assigns a block that is not a candidate to the class of blocks without a reported release.
    void assign_loose(BlockId id, int reuse_class, int64_t time) {
      LooseSegment& at = loose[static_cast<size_t>(reuse_class - ReuseClass::kLoose)];
      segments.assign(id, at.at(time, reuse_class, &segments));
    }

    Segments segments;
    WorthOrder order;
    std::array<LooseSegment, ReuseClass::kNum - ReuseClass::kLoose> loose;
    CopiedSegment ended;  // blocks whose priority has expired
  };

  // `tenant_share`: fraction of the blocks that one tenant may keep while others need space; 1: no
  // limit.
  Levels(int64_t num_blocks, const ReuseModel* model, double tenant_share)
      : num_blocks_(num_blocks),
        model_(model),
        has_shares_(tenant_share < 1),
        most_(static_cast<int64_t>(tenant_share * static_cast<double>(num_blocks - 1))),
        default_(num_blocks, model) {}

  // The level that owns this block's segment.
  Level& of(BlockId id) { return places_.empty() ? default_ : *level_of(id); }
  const Level& of(BlockId id) const { return const_cast<Levels*>(this)->of(id); }
  bool is_single() const { return places_.empty(); }  // no block has a priority or a tenant
  // The segments that record, for the blocks of all levels, whether a request has released the
  // block.
  Segments& told() { return default_.segments; }
  void prefetch(BlockId id) const { default_.segments.prefetch(id); }

  // Moves a block to its level. The block is being released and is not a candidate. If the release
  // assigns no priority, the block keeps its priority until it expires. `tenant`: the number of the
  // tenant; 0: no tenant, so no share applies.
  Level& move(BlockId id, const GivenPriority& given, uint32_t tenant) {
    const int bucket = has_shares_ && tenant != 0 ? static_cast<int>(1 + tenant % kTenants) : 0;
    if (given.priority < 0 && bucket == 0 && places_.empty()) return default_;
    return move_apart(id, given, bucket);
  }
  void forget(BlockId id) { leave(id); }  // drops segment, priority and tenant
  void set_now(int64_t ms) { now_ = std::max(now_, ms); }
  int64_t now() const { return now_; }

  BlockId victim() {
    if (places_.empty()) return default_.order.victim();
    end_priorities();
    std::map<Key, Level*>::iterator first = levels_.begin();
    while (first != levels_.end()) {
      const int32_t priority = first->first.first;
      BlockId victim = kNullBlock;
      int64_t most_over = 0;
      double least = 0;
      for (; first != levels_.end() && first->first.first == priority; ++first) {
        Level& level = *first->second;
        const BlockId id = level.order.victim();
        if (id == kNullBlock) continue;
        const int bucket = first->first.second;
        const int64_t over = bucket == 0 ? 0 : std::max<int64_t>(num_of_[bucket] - most_, 0);
        const double worth = level.order.worth(level.segments.of(id));
        if (victim != kNullBlock && (over < most_over || (over == most_over && worth >= least))) {
          continue;
        }
        victim = id;
        most_over = over;
        least = worth;
      }
      if (victim != kNullBlock) return victim;
    }
    return kNullBlock;
  }

  // Combines the segment's number with its level, because each level numbers its own segments.
  ReleasedAs released_as(BlockId id) const {
    ReleasedAs as = of(id).segments.released_as(id);
    if (as.segment == 0) return as;
    const auto found = places_.empty() ? places_.end() : places_.find(id);
    const Key key = found == places_.end() ? Key{kDefault, 0} : found->second.key;
    as.segment = (as.segment * 128 + key.first) * 64 + key.second;
    return as;
  }
  void clear() {
    default_.clear();
    levels_.clear();
    others_.clear();
    places_.clear();
    ends_.clear();
    num_of_.fill(0);
  }
  size_t num_bytes() const {
    // Estimated total size of a map node, a set node, and a place in a level.
    constexpr size_t kPlaceBytes = 128;
    return default_.segments.num_bytes() + places_.size() * kPlaceBytes;
  }

 private:
  static constexpr int32_t kDefault = 35;   // priority
  static constexpr uint32_t kTenants = 63;  // tenant buckets; additional tenants share them
  using Key = std::pair<int32_t, int>;      // priority and tenant bucket; 0: no tenant

  struct Place {  // the place of a block outside the default level
    Level* level;
    Key key;
    int64_t end;  // time at which the priority expires, in ms
  };

  Level* level_of(BlockId id) {
    const auto found = places_.find(id);
    return found == places_.end() ? &default_ : found->second.level;
  }
  Level* level_at(const Key& key) {
    if (levels_.empty()) levels_[{kDefault, 0}] = &default_;
    Level*& level = levels_[key];
    if (level == nullptr) {
      others_.push_back(std::make_unique<Level>(num_blocks_, model_));
      level = others_.back().get();
    }
    return level;
  }
  Level& move_apart(BlockId id, const GivenPriority& given, int bucket) {
    Place wanted{nullptr, {kDefault, bucket}, GivenPriority::kNever};
    const auto found = places_.find(id);
    if (given.priority >= 0) {
      if (given.end > now_) wanted.key.first = given.priority;
    } else if (found != places_.end() && found->second.end > now_) {
      wanted.key.first = found->second.key.first;
    }
    if (wanted.key.first != kDefault) {
      wanted.end = given.priority >= 0 ? given.end : found->second.end;
    }
    leave(id);
    return enter(id, wanted);
  }
  Level& enter(BlockId id, Place place) {
    if (place.key == Key{kDefault, 0}) return default_;
    place.level = level_at(place.key);
    places_[id] = place;
    if (place.end != GivenPriority::kNever) ends_.insert({place.end, id});
    ++num_of_[place.key.second];
    return *place.level;
  }
  // Removes a block from its segment and returns it to the default level. The block must not be a
  // candidate.
  void leave(BlockId id) {
    of(id).segments.assign(id, Segments::kNone);
    if (places_.empty()) return;
    const auto found = places_.find(id);
    if (found == places_.end()) return;
    ends_.erase({found->second.end, id});
    --num_of_[found->second.key.second];
    places_.erase(found);
  }
  // Resets expired priorities to the default.
  void end_priorities() {
    while (!ends_.empty() && ends_.begin()->first <= now_) {
      const BlockId id = ends_.begin()->second;
      Segments& before = of(id).segments;
      const bool is_listed = before.is_candidate(id);
      const ReleasedAs as = released_as(id);
      const int bucket = places_.at(id).key.second;
      if (is_listed) before.remove(id);
      leave(id);
      Level& level = enter(id, {nullptr, {kDefault, bucket}, GivenPriority::kNever});
      if (as.segment == 0) continue;
      level.segments.assign(id, level.ended.at(as, &level.segments));
      if (is_listed) level.segments.insert(id);
    }
  }

  int64_t num_blocks_;
  const ReuseModel* model_;
  bool has_shares_;
  int64_t most_;  // maximum blocks per tenant
  Level default_;
  std::map<Key, Level*> levels_;  // empty until a second level exists
  std::vector<std::unique_ptr<Level>> others_;
  std::unordered_map<BlockId, Place> places_;
  std::set<std::pair<int64_t, BlockId>> ends_;  // expiry times of temporary priorities
  std::array<int64_t, kTenants + 1> num_of_{};  // blocks per tenant bucket
  int64_t now_ = 0;                             // ms
};

}  // namespace kvcache
