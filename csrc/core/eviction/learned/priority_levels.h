// Segments of blocks by their priority: a lower one goes first, whatever its blocks are worth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/eviction/given_priority.h"
#include "core/eviction/learned/copied_segment.h"
#include "core/eviction/learned/loose_segment.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/worth_order.h"

namespace kvcache {

// Mostly no block has a priority: then there is one level, and nothing is searched.
class PriorityLevels {
 public:
  static constexpr int32_t kDefault = 35;

  struct Level {
    Level(int64_t num_blocks, const ReuseModel* model)
        : segments(num_blocks), order(model, &segments) {}

    Segments segments;
    WorthOrder order;
    LooseSegment loose{ReuseClass::kLoose};
  };

  PriorityLevels(int64_t num_blocks, const ReuseModel* model)
      : num_blocks_(num_blocks), model_(model), default_(num_blocks, model) {}

  // The level of a block, which all that is said of it concerns.
  Level& of(BlockId id) { return given_.empty() ? default_ : *level_of(id); }
  const Level& of(BlockId id) const { return const_cast<PriorityLevels*>(this)->of(id); }
  // Keys are kept here, whatever the level.
  Segments& keys() { return default_.segments; }
  const Segments& keys() const { return default_.segments; }

  // The level of a block that is released now, and no candidate; it leaves the one before. A
  // release that gives no priority leaves the block its own, until that ends.
  Level& move(BlockId id, const GivenPriority& given) {
    if (given.priority >= 0) {
      leave(id);
      if (given.priority != kDefault && given.end > now_) {
        given_[id] = {&level_at(given.priority), given.priority, given.end};
        if (given.end != GivenPriority::kNever) ends_.insert({given.end, id});
      }
    } else if (!given_.empty()) {
      const auto found = given_.find(id);
      if (found != given_.end() && found->second.end <= now_) leave(id);
    }
    return of(id);
  }
  void forget(BlockId id) { leave(id); }  // it has no segment and no priority any more
  void set_now(int64_t ms) { now_ = std::max(now_, ms); }
  int64_t now() const { return now_; }

  BlockId victim() {
    end_priorities();
    auto next = others_.begin();
    for (; next != others_.end() && next->first < kDefault; ++next) {
      const BlockId id = next->second->order.victim();
      if (id != kNullBlock) return id;
    }
    const BlockId id = default_.order.victim();
    if (id != kNullBlock) return id;
    for (; next != others_.end(); ++next) {
      const BlockId other = next->second->order.victim();
      if (other != kNullBlock) return other;
    }
    return kNullBlock;
  }

  // Segments of different levels have different numbers there.
  ReleasedAs released_as(BlockId id) const {
    ReleasedAs as = of(id).segments.released_as(id);
    const auto found = given_.empty() ? given_.end() : given_.find(id);
    as.segment *= 128;
    if (found != given_.end() && as.segment != 0) as.segment += 1 + found->second.priority;
    return as;
  }
  void clear() {
    default_.segments.clear();
    default_.order.clear();
    default_.loose.clear();
    ended_.clear();
    others_.clear();
    given_.clear();
    ends_.clear();
  }
  size_t num_bytes() const {
    constexpr size_t kGivenBytes = 96;  // nodes of a map and of a set
    return default_.segments.num_bytes() + given_.size() * kGivenBytes;
  }

 private:
  struct Given {
    Level* level;
    int32_t priority;
    int64_t end;
  };

  Level* level_of(BlockId id) {
    const auto found = given_.find(id);
    return found == given_.end() ? &default_ : found->second.level;
  }
  Level& level_at(int32_t priority) {
    std::unique_ptr<Level>& level = others_[priority];
    if (level == nullptr) level = std::make_unique<Level>(num_blocks_, model_);
    return *level;
  }
  // The block has no segment then, and the default priority.
  void leave(BlockId id) {
    of(id).segments.assign(id, Segments::kNone);
    if (given_.empty()) return;
    const auto found = given_.find(id);
    if (found == given_.end()) return;
    ends_.erase({found->second.end, id});
    given_.erase(found);
  }
  // What lasted until now has the default priority from now on.
  void end_priorities() {
    while (!ends_.empty() && ends_.begin()->first <= now_) {
      const BlockId id = ends_.begin()->second;
      Segments& before = of(id).segments;
      const bool is_listed = before.is_listed(id);
      const ReleasedAs as = released_as(id);
      if (is_listed) before.remove(id);
      leave(id);
      if (as.segment == 0) continue;
      default_.segments.assign(id, ended_.at(as, &default_.segments));
      if (is_listed) default_.segments.insert(id);
    }
  }

  int64_t num_blocks_;
  const ReuseModel* model_;
  Level default_;
  CopiedSegment ended_;                               // of the default level
  std::map<int32_t, std::unique_ptr<Level>> others_;  // by priority
  std::unordered_map<BlockId, Given> given_;
  std::set<std::pair<int64_t, BlockId>> ends_;  // of those given that do not last for ever
  int64_t now_ = 0;                             // ms
};

}  // namespace kvcache
