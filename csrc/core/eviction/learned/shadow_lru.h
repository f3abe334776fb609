// SPDX-License-Identifier: Apache-2.0
// Simulates, for a sample of the blocks, a pool that evicts the least recently released block
// first. Blocks held by requests are not evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// Stores held keys, and released keys in the order of their releases. While more than `capacity`
// keys are present, the released key that is first in this order is removed.
class ShadowLru {
 public:
  explicit ShadowLru(int64_t capacity)  // 1 to 32,767
      : capacity_(static_cast<size_t>(capacity)), heads_(num_heads(capacity), kNone) {
    nodes_.reserve(capacity_ + 2);
    clear();
  }

  int64_t capacity() const { return static_cast<int64_t>(capacity_); }
  bool contains(uint32_t key) const { return find(key) != kNone; }
  // Marks the key as held. Returns whether the key was present.
  bool hold(uint32_t key) {
    uint16_t i = find(key);
    const bool was_present = i != kNone;
    if (was_present) {
      if (!is_held(i)) unlink(i);
    } else {
      i = add(key);
      if (i == kNone) return false;
    }
    nodes_[i].older = nodes_[i].younger = i;  // held
    if (!was_present) shrink();
    return was_present;
  }
  void release(uint32_t key) {
    uint16_t i = find(key);
    if (i == kNone) {
      i = add(key);
      if (i == kNone) return;
    } else if (!is_held(i)) {
      unlink(i);
    }
    link_youngest(i);
    shrink();
  }
  void remove(uint32_t key) {
    const uint16_t i = find(key);
    if (i == kNone) return;
    if (!is_held(i)) unlink(i);
    drop(i);
  }
  void clear() {
    nodes_.assign(1, {0, 0, 0, kNone});  // node 0 closes the list
    heads_.assign(heads_.size(), kNone);
    unused_ = kNone;
    num_present_ = 0;
  }
  size_t num_bytes() const {
    return nodes_.capacity() * sizeof(Node) + heads_.capacity() * sizeof(uint16_t);
  }

 private:
  static constexpr uint16_t kNone = UINT16_MAX;
  struct Node {
    uint32_t key;
    uint16_t older, younger;  // for a held key, the node itself
    uint16_t same_head;       // next node with the same head; also links unused nodes
  };

  static size_t num_heads(int64_t capacity) {
    size_t num = 1;
    while (num < static_cast<size_t>(capacity)) num *= 2;
    return num;
  }
  size_t head_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }
  uint16_t find(uint32_t key) const {
    uint16_t i = heads_[head_of(key)];
    while (i != kNone && nodes_[i].key != key) i = nodes_[i].same_head;
    return i;
  }
  bool is_held(uint16_t i) const { return nodes_[i].older == i; }
  // Adds a node that is not linked into the list. Returns kNone if there are too many.
  uint16_t add(uint32_t key) {
    uint16_t i = unused_;
    if (i != kNone) {
      unused_ = nodes_[i].same_head;
    } else if (nodes_.size() < kNone) {
      i = static_cast<uint16_t>(nodes_.size());
      nodes_.emplace_back();
    } else {
      return kNone;
    }
    nodes_[i].key = key;
    nodes_[i].same_head = heads_[head_of(key)];
    heads_[head_of(key)] = i;
    ++num_present_;
    return i;
  }
  void shrink() {
    while (num_present_ > capacity_ && nodes_[0].younger != 0) {
      const uint16_t oldest = nodes_[0].younger;
      unlink(oldest);
      drop(oldest);
    }
  }
  // Removes a node that is not linked into the list.
  void drop(uint16_t i) {
    uint16_t* at = &heads_[head_of(nodes_[i].key)];
    while (*at != i) at = &nodes_[*at].same_head;
    *at = nodes_[i].same_head;
    nodes_[i].same_head = unused_;
    unused_ = i;
    --num_present_;
  }
  void unlink(uint16_t i) {
    nodes_[nodes_[i].older].younger = nodes_[i].younger;
    nodes_[nodes_[i].younger].older = nodes_[i].older;
  }
  void link_youngest(uint16_t i) {
    nodes_[i].older = nodes_[0].older;
    nodes_[i].younger = 0;
    nodes_[nodes_[0].older].younger = i;
    nodes_[0].older = i;
  }

  size_t capacity_;
  std::vector<Node> nodes_;
  std::vector<uint16_t> heads_;
  uint16_t unused_ = kNone;
  size_t num_present_ = 0;
};

}  // namespace kvcache
