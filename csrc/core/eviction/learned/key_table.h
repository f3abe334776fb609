// SPDX-License-Identifier: Apache-2.0
// Nodes that are found by a 32-bit key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// A hash table with chaining. Nodes are identified by their number, from 1. Node 0 has no key and
// is available to the caller, for example as the end of a list.
template <class Data>
class KeyTable {
 public:
  static constexpr uint32_t kNone = 0;

  // `expected`: the expected number of keys.
  explicit KeyTable(size_t expected) : heads_(num_heads(expected), kNone) {
    nodes_.reserve(expected + 2);
    clear();
  }

  Data& operator[](uint32_t i) { return nodes_[i].data; }
  const Data& operator[](uint32_t i) const { return nodes_[i].data; }
  uint32_t key_of(uint32_t i) const { return nodes_[i].key; }
  size_t size() const { return num_present_; }
  // Returns the node with this key; kNone if there is none.
  uint32_t find(uint32_t key) const {
    uint32_t i = heads_[head_of(key)];
    while (i != kNone && nodes_[i].key != key) i = nodes_[i].next;
    return i;
  }
  // Adds a node for a key that has none.
  uint32_t add(uint32_t key) {
    uint32_t i = unused_;
    if (i != kNone) {
      unused_ = nodes_[i].next;
    } else {
      i = static_cast<uint32_t>(nodes_.size());
      nodes_.emplace_back();
    }
    uint32_t& head = heads_[head_of(key)];
    nodes_[i] = {key, head, {}};
    head = i;
    ++num_present_;
    return i;
  }
  void remove(uint32_t i) {
    uint32_t* at = &heads_[head_of(nodes_[i].key)];
    while (*at != i) at = &nodes_[*at].next;
    *at = nodes_[i].next;
    nodes_[i].next = unused_;
    unused_ = i;
    --num_present_;
  }
  void clear() {
    nodes_.assign(1, {});
    heads_.assign(heads_.size(), kNone);
    unused_ = kNone;
    num_present_ = 0;
  }
  size_t num_bytes() const {
    return nodes_.capacity() * sizeof(Node) + heads_.capacity() * sizeof(uint32_t);
  }

 private:
  struct Node {
    uint32_t key;
    uint32_t next;  // next node with the same head; also links unused nodes
    [[no_unique_address]] Data data;
  };

  static size_t num_heads(size_t expected) {
    size_t num = 1;
    while (num < expected) num *= 2;
    return num;
  }
  size_t head_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }

  std::vector<Node> nodes_;
  std::vector<uint32_t> heads_;
  uint32_t unused_ = kNone;
  size_t num_present_ = 0;
};

}  // namespace kvcache
