// SPDX-License-Identifier: Apache-2.0
// Simulates a pool that evicts the blocks with the lowest learned value first. Blocks that requests
// hold are not evicted.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/eviction/learned/copied_segment.h"
#include "core/eviction/learned/key_table.h"
#include "core/eviction/learned/last_segment.h"
#include "core/eviction/learned/loose_segment.h"
#include "core/eviction/learned/reuse_class.h"
#include "core/eviction/learned/reuse_model.h"
#include "core/eviction/learned/segments.h"
#include "core/eviction/learned/worth_order.h"

namespace kvcache {

// Blocks are identified by their keys. They are assigned to segments in the same way as the blocks
// of the real pool. The real pool evicts a block only after the blocks that follow it in its chain.
// This pool guarantees that order only within a segment.
class ShadowWorth {
 public:
  // `num_host`: capacity of the host that receives what this pool evicts; 0: no host.
  ShadowWorth(int64_t capacity, int64_t num_host, const ReuseModel* model)
      : capacity_(static_cast<size_t>(capacity)),
        blocks_(capacity_),
        segments_(static_cast<int64_t>(most_blocks())),
        order_(model, &segments_, /*may_follow_lru=*/false),
        model_(model) {
    if (num_host > 0) host_ = std::make_unique<ShadowWorth>(num_host, 0, model);
  }

  bool contains(uint32_t key, bool on_host) const {
    return blocks_.find(key) != kNone ||
           (on_host && host_ != nullptr && host_->contains(key, false));
  }
  // Marks the key as held. Returns whether the key was present.
  bool hold(uint32_t key) {
    const uint32_t i = blocks_.find(key);
    if (i != kNone) {
      if (segments_.is_candidate(id_of(i))) segments_.remove(id_of(i));
      return true;
    }
    if (host_ != nullptr) host_->load(key);
    add(key);
    return false;
  }
  // Opens the segment to which the next calls of `release` assign their keys.
  void open(int reuse_class, int num_forks, float cost) {
    opened_ = {reuse_class, num_forks, cost};
    last_.clear();
  }
  // A request releases the key. The key stays held until the call of `make_idle`.
  void release(uint32_t key) {
    const uint32_t i = find_or_add(key);
    if (i == kNone) return;
    int32_t s = last_.in(segments_);
    if (s == Segments::kNone) {
      s = segments_.open(model_->clock(), opened_.reuse_class, opened_.num_forks, opened_.cost);
      last_.set(s, segments_);
    }
    reassign(i, s);
  }
  // Assigns a key to a class of blocks without a reported release.
  void assign_loose(uint32_t key, int reuse_class) {
    const uint32_t i = find_or_add(key);
    if (i == kNone) return;
    LooseSegment& at = loose_[static_cast<size_t>(reuse_class - ReuseClass::kLoose)];
    reassign(i, at.at(model_->clock(), reuse_class, &segments_));
  }
  void make_idle(uint32_t key) {
    const uint32_t i = find_or_add(key);
    if (i == kNone || segments_.is_candidate(id_of(i))) return;
    if (segments_.of(id_of(i)) == Segments::kNone) assign_loose(key, ReuseClass::kLoose);
    segments_.insert(id_of(i));
    shrink();
  }
  void remove(uint32_t key) {
    const uint32_t i = blocks_.find(key);
    if (i == kNone) return;
    if (segments_.is_candidate(id_of(i))) segments_.remove(id_of(i));
    drop(i);
  }
  // Records that a request would read this window block or state at the end of its hit. Has no
  // effect if the block is not present.
  void note_end(uint32_t key) {
    const bool is_on_device = contains(key, /*on_host=*/false);
    if (!is_on_device && !contains(key, /*on_host=*/true)) return;
    const uint32_t i = find_or_add(key);
    if (i == kNone) return;
    if (!is_on_device) host_->load(key);
    assign_loose(key, ReuseClass::hit(segments_[segments_.of(id_of(i))].reuse_class));
    if (!is_on_device) make_idle(key);
  }
  void clear() {
    blocks_.clear();
    segments_.clear();
    order_.clear();
    for (LooseSegment& each : loose_) each.clear();
    copies_.clear();
    loaded_.clear();
    last_.clear();
  }
  void clear_host() {
    if (host_ != nullptr) host_->clear();
  }
  size_t num_bytes() const {
    return sizeof(*this) + blocks_.num_bytes() + segments_.num_bytes() +
           (host_ == nullptr ? 0 : host_->num_bytes());
  }

 private:
  struct Nothing {};
  using Table = KeyTable<Nothing>;
  static constexpr uint32_t kNone = Table::kNone;

  // Requests may hold more blocks than fit. Additional blocks are ignored.
  size_t most_blocks() const { return 2 * capacity_ + 64; }
  static BlockId id_of(uint32_t i) { return static_cast<BlockId>(i); }
  uint32_t add(uint32_t key) {
    if (blocks_.size() + 2 >= most_blocks()) return kNone;
    const uint32_t i = blocks_.add(key);
    shrink();
    return i;
  }
  uint32_t find_or_add(uint32_t key) {
    const uint32_t i = blocks_.find(key);
    return i == kNone ? add(key) : i;
  }
  void shrink() {
    while (blocks_.size() > capacity_) {
      const BlockId victim = order_.victim();
      if (victim == kNullBlock) return;
      segments_.remove(victim);
      if (host_ != nullptr) {
        host_->copy(blocks_.key_of(static_cast<uint32_t>(victim)), segments_.released_as(victim));
      }
      drop(static_cast<uint32_t>(victim));
    }
  }
  // The device calls the next two functions of its host when it evicts or loads a block.
  void copy(uint32_t key, const ReleasedAs& as) {
    const uint32_t i = find_or_add(key);
    if (i == kNone) return;
    reassign(i, copies_.at(as, &segments_));
    make_idle(key);
  }
  void load(uint32_t key) {
    const uint32_t i = blocks_.find(key);
    if (i == kNone) return;
    reassign(i, loaded_.at(model_->clock(), ReuseClass::kLoaded, &segments_));
  }
  // Assigns a block to another segment.
  void reassign(uint32_t i, int32_t s) {
    const bool is_candidate = segments_.is_candidate(id_of(i));
    if (is_candidate) segments_.remove(id_of(i));
    segments_.assign(id_of(i), s);
    if (is_candidate) segments_.insert(id_of(i));
  }
  void drop(uint32_t i) {
    segments_.assign(id_of(i), Segments::kNone);
    blocks_.remove(i);
  }

  struct Opened {
    int reuse_class = 0, num_forks = 0;
    float cost = 1;
  };

  size_t capacity_;
  Table blocks_;
  Segments segments_;
  WorthOrder order_;
  const ReuseModel* model_;
  std::array<LooseSegment, ReuseClass::kNum - ReuseClass::kLoose> loose_;
  CopiedSegment copies_;
  LooseSegment loaded_;
  std::unique_ptr<ShadowWorth> host_;
  Opened opened_;
  LastSegment last_;  // the opened segment
};

}  // namespace kvcache
