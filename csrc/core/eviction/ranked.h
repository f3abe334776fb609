// SPDX-License-Identifier: Apache-2.0
// Blocks ordered by a key, smallest first, in a binary heap that records each block's position.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// O(log n) per change, O(1) for the first block. Blocks with equal keys have no defined order.
template <class Key>
class Ranked {
 public:
  explicit Ranked(int64_t num_blocks) : place_(static_cast<size_t>(num_blocks)) {}

  bool has(BlockId id) const { return place_[id] != 0; }
  BlockId top() const { return heap_.empty() ? kNullBlock : heap_.front().id; }
  const Key& top_key() const { return heap_.front().key; }  // the heap must not be empty
  size_t size() const { return heap_.size(); }

  // Inserts a block, or updates its key.
  void set(BlockId id, const Key& key) {
    if (!has(id)) {
      heap_.push_back({key, id});
      rise(heap_.size() - 1);
      return;
    }
    const size_t i = index_of(id);
    const bool earlier = key < heap_[i].key;
    heap_[i].key = key;
    earlier ? rise(i) : sink(i);
  }

  void erase(BlockId id) {
    if (!has(id)) return;
    const size_t i = index_of(id);
    place_[id] = 0;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (i == heap_.size()) return;
    heap_[i] = last;
    rise(i);
    sink(index_of(last.id));
  }

  void clear() {
    for (const Entry& entry : heap_) place_[entry.id] = 0;
    heap_.clear();
  }

  size_t num_bytes() const { return place_.num_bytes() + heap_.capacity() * sizeof(Entry); }

 private:
  struct Entry {
    Key key;
    BlockId id;
  };
  size_t index_of(BlockId id) const { return static_cast<size_t>(place_[id]) - 1; }
  void put(size_t i, const Entry& entry) {
    heap_[i] = entry;
    place_[entry.id] = static_cast<int32_t>(i) + 1;
  }
  void rise(size_t i) {
    const Entry entry = heap_[i];
    for (; i > 0 && entry.key < heap_[(i - 1) / 2].key; i = (i - 1) / 2) put(i, heap_[(i - 1) / 2]);
    put(i, entry);
  }
  void sink(size_t i) {
    const Entry entry = heap_[i];
    for (;;) {
      size_t child = 2 * i + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && heap_[child + 1].key < heap_[child].key) ++child;
      if (!(heap_[child].key < entry.key)) break;
      put(i, heap_[child]);
      i = child;
    }
    put(i, entry);
  }

  std::vector<Entry> heap_;
  ZeroedArray<int32_t> place_;  // position in the heap, counted from 1; 0: absent
};

}  // namespace kvcache
