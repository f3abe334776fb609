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
  // `next`: receives the keys that this cache evicts; null: none.
  explicit ShadowLru(int64_t capacity, ShadowLru* next = nullptr)
      : capacity_(static_cast<size_t>(capacity)), next_(next), heads_(num_heads(capacity), kNone) {
    nodes_.reserve(capacity_ + 2);
    clear();
  }

  int64_t capacity() const { return static_cast<int64_t>(capacity_); }
  bool contains(uint32_t key) const { return find(key) != kNone; }
  // Marks the key as held. Returns whether the key was present.
  bool hold(uint32_t key) {
    uint32_t i = find(key);
    const bool was_present = i != kNone;
    if (was_present) {
      if (!is_held(i)) unlink(i);
    } else {
      i = add(key);
    }
    nodes_[i].older = nodes_[i].younger = i;  // held
    if (!was_present) shrink();
    return was_present;
  }
  void release(uint32_t key) {
    uint32_t i = find(key);
    if (i == kNone) {
      i = add(key);
    } else if (!is_held(i)) {
      unlink(i);
    }
    link_youngest(i);
    shrink();
  }
  // Makes a key the youngest, unless a request holds it. Adds it if it is not present.
  void touch(uint32_t key) {
    const uint32_t i = find(key);
    if (i == kNone || !is_held(i)) release(key);
  }
  void remove(uint32_t key) {
    const uint32_t i = find(key);
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
    return nodes_.capacity() * sizeof(Node) + heads_.capacity() * sizeof(uint32_t);
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Node {
    uint32_t key;
    uint32_t older, younger;  // for a held key, the node itself
    uint32_t same_head;       // next node with the same head; also links unused nodes
  };

  static size_t num_heads(int64_t capacity) {
    size_t num = 1;
    while (num < static_cast<size_t>(capacity)) num *= 2;
    return num;
  }
  size_t head_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }
  uint32_t find(uint32_t key) const {
    uint32_t i = heads_[head_of(key)];
    while (i != kNone && nodes_[i].key != key) i = nodes_[i].same_head;
    return i;
  }
  bool is_held(uint32_t i) const { return nodes_[i].older == i; }
  // Adds a node that is not linked into the list.
  uint32_t add(uint32_t key) {
    uint32_t i = unused_;
    if (i != kNone) {
      unused_ = nodes_[i].same_head;
    } else {
      i = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
    }
    nodes_[i].key = key;
    nodes_[i].same_head = heads_[head_of(key)];
    heads_[head_of(key)] = i;
    ++num_present_;
    return i;
  }
  void shrink() {
    while (num_present_ > capacity_ && nodes_[0].younger != 0) {
      const uint32_t oldest = nodes_[0].younger;
      if (next_ != nullptr) next_->touch(nodes_[oldest].key);
      unlink(oldest);
      drop(oldest);
    }
  }
  // Removes a node that is not linked into the list.
  void drop(uint32_t i) {
    uint32_t* at = &heads_[head_of(nodes_[i].key)];
    while (*at != i) at = &nodes_[*at].same_head;
    *at = nodes_[i].same_head;
    nodes_[i].same_head = unused_;
    unused_ = i;
    --num_present_;
  }
  void unlink(uint32_t i) {
    nodes_[nodes_[i].older].younger = nodes_[i].younger;
    nodes_[nodes_[i].younger].older = nodes_[i].older;
  }
  void link_youngest(uint32_t i) {
    nodes_[i].older = nodes_[0].older;
    nodes_[i].younger = 0;
    nodes_[nodes_[0].older].younger = i;
    nodes_[0].older = i;
  }

  size_t capacity_;
  ShadowLru* next_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> heads_;
  uint32_t unused_ = kNone;
  size_t num_present_ = 0;
};

}  // namespace kvcache
