// SPDX-License-Identifier: Apache-2.0
#include "sanitizer/shadow.h"

#include <algorithm>

namespace kvcache::sanitizer {

Shadow::Shadow(int64_t num_blocks, int64_t stride, int64_t history)
    : num_blocks_(num_blocks),
      stride_(stride),
      history_(history),
      slots_(static_cast<size_t>(num_blocks * stride)),
      blocks_(static_cast<size_t>(num_blocks)),
      ring_(static_cast<size_t>(num_blocks * history)),
      changed_at_(static_cast<size_t>(num_blocks)) {}

int64_t Shadow::num_bytes() const {
  return static_cast<int64_t>(slots_.num_bytes() + blocks_.size() * sizeof(ShadowBlock) +
                              ring_.num_bytes() + changed_at_.num_bytes());
}

void Shadow::clear(int64_t block) {
  std::fill_n(&slot(block, 0), stride_, ShadowSlot{});
  this->block(block).owner = kNobody;
  change(block);
}

void Shadow::drop_stale(int64_t block, int64_t first_offset) {
  std::fill(&slot(block, first_offset), &slot(block, 0) + stride_, ShadowSlot{});
  this->block(block).is_fresh = false;
  change(block);
}

void Shadow::take_over(int64_t block, int16_t group) {
  int16_t& owner = this->block(block).owner;
  if (owner == group) return;
  if (owner != kNobody) clear(block);
  owner = group;
}

void Shadow::log(int64_t block, const ShadowEvent& event) {
  const int64_t count = this->block(block).num_events++;
  ring_[static_cast<size_t>(block * history_ + count % history_)] = event;
}

std::vector<ShadowEvent> Shadow::events(int64_t block) const {
  const int64_t count = blocks_[static_cast<size_t>(block)].num_events;
  std::vector<ShadowEvent> out;
  for (int64_t i = std::max<int64_t>(count - history_, 0); i < count; ++i) {
    out.push_back(ring_[static_cast<size_t>(block * history_ + i % history_)]);
  }
  return out;
}

}  // namespace kvcache::sanitizer
