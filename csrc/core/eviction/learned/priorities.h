// SPDX-License-Identifier: Apache-2.0
// Candidates with a priority other than the default.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/eviction/given_priority.h"
#include "core/hash.h"

namespace kvcache {

// Candidates with a lower priority are evicted before those with the default priority, and
// candidates with a higher one after them; among equal priorities, in the order of their releases.
class Priorities {
 public:
  static constexpr int32_t kDefault = 35;

  bool has(BlockId id) const { return !given_.empty() && given_.count(id) != 0; }
  bool is_candidate(BlockId id) const { return has(id) && given_.at(id).number != kNotListed; }
  // The block must not be a candidate. An earlier priority ends.
  void give(BlockId id, const GivenPriority& given) {
    given_.erase(id);
    if (given.priority != kDefault) given_[id] = {given, kNotListed};
  }
  void forget(BlockId id) { given_.erase(id); }
  // Makes a block that has a priority a candidate. `number`: position in the order of releases.
  void insert(BlockId id, uint32_t number) {
    State& state = given_[id];
    state.number = number;
    listed_.insert(key_of(id, state));
    ends_.insert({state.given.end, id});
  }
  void remove(BlockId id) {
    State& state = given_[id];
    listed_.erase(key_of(id, state));
    ends_.erase({state.given.end, id});
    state.number = kNotListed;
  }
  // Returns a candidate whose priority has expired; the null block if there is none.
  BlockId expired(int64_t now) const {
    return !ends_.empty() && ends_.begin()->first <= now ? ends_.begin()->second : kNullBlock;
  }
  bool has_expired(BlockId id, int64_t now) const { return given_.at(id).given.end <= now; }
  // Returns the first candidate, if its priority is below the default or `any`.
  BlockId first(bool any) const {
    if (listed_.empty() || (!any && std::get<0>(*listed_.begin()) > kDefault)) return kNullBlock;
    return std::get<2>(*listed_.begin());
  }
  void clear() { *this = {}; }
  size_t num_bytes() const { return given_.size() * 160; }  // about three nodes

 private:
  static constexpr int64_t kNotListed = -1;
  struct State {
    GivenPriority given;
    int64_t number;
  };
  static std::tuple<int32_t, int64_t, BlockId> key_of(BlockId id, const State& state) {
    return {state.given.priority, state.number, id};
  }

  std::unordered_map<BlockId, State> given_;
  std::set<std::tuple<int32_t, int64_t, BlockId>> listed_;
  std::set<std::pair<int64_t, BlockId>> ends_;  // of candidates
};

}  // namespace kvcache
