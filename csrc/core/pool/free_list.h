// The order in which free blocks are handed out.
#pragma once

#include "core/hash.h"

namespace kvcache {

// Neighbours in a free list. Apart from Block and small, because eviction walks a list from its
// head, where the next id is known only once the link was read: these stay in the processor's
// caches.
struct Link {
  BlockId prev, next;
};

// First in, first out: push at the tail, remove anywhere, O(1). Released blocks enter at the tail,
// so the head is the least recently released one.
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
  // All of `other`, in its order, behind what is here.
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
