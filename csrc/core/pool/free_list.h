// SPDX-License-Identifier: Apache-2.0
// The order in which free blocks are allocated.
#pragma once

#include "core/hash.h"

namespace kvcache {

// Free-list links. They are stored apart from Block so that they fit into the CPU caches, because
// eviction walks a list from its head and knows the next id only after reading a link.
struct Link {
  BlockId prev, next;
};

// A FIFO queue with O(1) push at the tail and O(1) removal anywhere. Released blocks enter at the
// tail, so the head is the least recently released block.
class FreeList {
 public:
  BlockId head() const { return head_; }
  BlockId tail() const { return tail_; }

  void push(Link* links, BlockId id) {
    links[id] = {tail_, kNullBlock};
    (tail_ == kNullBlock ? head_ : links[tail_].next) = id;
    tail_ = id;
  }
  void remove(Link* links, BlockId id) {
    const Link link = links[id];
    (link.prev == kNullBlock ? head_ : links[link.prev].next) = link.next;
    (link.next == kNullBlock ? tail_ : links[link.next].prev) = link.prev;
  }
  // Appends all blocks of `other`, in the same order.
  void take_over(Link* links, FreeList* other) {
    if (other->head_ == kNullBlock) return;
    (tail_ == kNullBlock ? head_ : links[tail_].next) = other->head_;
    links[other->head_].prev = tail_;
    tail_ = other->tail_;
    *other = FreeList();
  }

 private:
  BlockId head_ = kNullBlock;
  BlockId tail_ = kNullBlock;
};

}  // namespace kvcache
