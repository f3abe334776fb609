// SPDX-License-Identifier: Apache-2.0
#include "core/pool/partial_index.h"

namespace kvcache {

void PartialIndex::add(BlockId id, const Hash& hash, uint8_t group, uint64_t variant) {
  int32_t at = unused_;
  if (at == kNone) {
    at = static_cast<int32_t>(parts_.size());
    parts_.emplace_back();
  } else {
    unused_ = parts_[at].next_of_block;
  }
  const auto [block, is_first_part] = of_block_.emplace(id, kNone);
  parts_[at] = {{hash, group}, id, kNone, kNone, block->second, variant};
  block->second = at;
  const auto [ends, is_first_block] = by_hash_.emplace(parts_[at].key, Ends{at, at});
  if (is_first_block) return;
  parts_[at].older = ends->second.last;
  parts_[ends->second.last].younger = at;
  ends->second.last = at;
}

void PartialIndex::forget(BlockId id) {
  const auto block = of_block_.find(id);
  if (block == of_block_.end()) return;
  for (int32_t at = block->second; at != kNone;) {
    Part& part = parts_[at];
    const auto ends = by_hash_.find(part.key);
    (part.older == kNone ? ends->second.first : parts_[part.older].younger) = part.younger;
    (part.younger == kNone ? ends->second.last : parts_[part.younger].older) = part.older;
    if (ends->second.first == kNone) by_hash_.erase(ends);
    const int32_t next = part.next_of_block;
    part.next_of_block = unused_;
    unused_ = at;
    at = next;
  }
  of_block_.erase(block);
}

void PartialIndex::clear() {
  parts_.clear();
  unused_ = kNone;
  by_hash_.clear();
  of_block_.clear();
}

std::vector<Hash> PartialIndex::of(BlockId id) const {
  std::vector<Hash> out;
  const auto block = of_block_.find(id);
  if (block == of_block_.end()) return out;
  for (int32_t at = block->second; at != kNone; at = parts_[at].next_of_block) {
    out.push_back(parts_[at].key.hash);
  }
  return out;
}

}  // namespace kvcache
